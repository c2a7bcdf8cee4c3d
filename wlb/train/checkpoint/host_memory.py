"""Return freed host memory to the operating system.

The C library keeps freed memory for allocations of the same size, which hardly repeat as
micro-batches differ in length: 100 to 170 of a demo rank's 430 MiB were such gaps. Giving them back
takes 1 ms (experiments/LOG.md).
"""

import ctypes


def give_back_freed() -> bool:
    """Whether the C library gave memory back; False as well where it cannot (not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(trim is not None and trim(ctypes.c_size_t(0)))
