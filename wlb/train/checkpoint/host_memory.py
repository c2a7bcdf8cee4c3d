"""Returns freed host memory to the operating system.

The C library keeps freed memory for later allocations of the same size. Sizes hardly repeat,
because micro-batches differ in length: 100 to 170 MiB of the 430 MiB of a rank of the demo were
such gaps. Returning them takes 1 ms (experiments/LOG.md).
"""

import ctypes


def give_back_freed() -> bool:
    """Return freed memory to the operating system.

    Returns:
        Whether any was returned; false also where the C library cannot do it (not glibc).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(trim is not None and trim(ctypes.c_size_t(0)))
