"""Give memory that is freed while a model loads back to the system, so that the C library does not keep it.

glibc expects freed memory to be wanted again. From then on it serves matrices of up to 32 MiB from its
heap, where small pieces that stay come to lie between large ones that are gone. Loading makes a float32
copy of each matrix and keeps an 8-bit one, so a stage would hold nearly twice the memory that it needs.

glibc's limits apply to the whole process, so loading a stage changes them for all of it. `large_apart`
sets them while a model loads, and afterwards to the values that glibc itself adopts once a large piece was
freed. Earlier settings by `mallopt` or `MALLOC_MMAP_THRESHOLD_` cannot be read, so they are lost.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The parameters' numbers in malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 20
# The value to which glibc raises the limit by itself once such a piece was freed.
_MOST_FROM_HEAP = 32 << 20
_MOST_KEPT = 2 * _MOST_FROM_HEAP


def release_freed() -> None:
    """Give freed memory that the C library keeps back to the system. Without glibc nothing happens.

    Tokenising a long text makes and frees millions of small pieces, of which glibc keeps gigabytes.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def large_apart() -> Iterator[None]:
    """Give allocations of a MiB or more pages of their own inside the body, in every thread of this process.

    Without glibc nothing happens.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is None or trim is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        # Steps free and allocate the same pieces again and again, which is quicker from the heap.
        mallopt(_MMAP_THRESHOLD, _MOST_FROM_HEAP)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
        trim(ctypes.c_size_t(0))
