"""Host memory that was freed goes back to the operating system.

The C library keeps what is freed below its top for the next allocation of that size. Micro-batches
differ in length, so sizes hardly repeat: of a demo rank's 430 MiB, 100 to 170 were such gaps, and
they grew over an hour; a save's copies of the state leave theirs. Giving them back takes 1 ms for a
demo rank (experiments/LOG.md).
"""

import ctypes


def give_back_freed() -> bool:
    """Whether the C library gave memory back; False as well where it cannot (not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(trim is not None and trim(ctypes.c_size_t(0)))
