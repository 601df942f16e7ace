"""Memory that is freed while a model loads goes back to the system, and is not kept by the C library.

glibc takes what is freed to be wanted again: from then on it serves matrices of up to 32 MiB from its heap,
where small ones that stay come to lie between large ones that are gone. Loading makes a float32 copy of each
matrix and keeps an 8-bit one, so a stage would hold nearly twice what it needs.

glibc knows no limits but those of the whole process, so whoever loads a stage in a process of their own has
them changed: while it loads, and after that to where glibc itself takes them once a large piece was freed.
What `mallopt` was told before, or by `MALLOC_MMAP_THRESHOLD_`, cannot be asked for, and is gone then.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE = 1 << 20
_MOST_FROM_HEAP = 32 << 20  # to what glibc raises it by itself once such a piece was freed
_MOST_KEPT = 2 * _MOST_FROM_HEAP


def release_freed() -> None:
    """Give back to the system what was freed and is kept for later; without glibc nothing happens.

    Tokenising a long text makes and frees millions of small pieces, of which glibc keeps gigabytes.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def large_apart() -> Iterator[None]:
    """While it lasts, what takes a MiB or more has pages of its own, in every thread of this process.

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
        # steps free and take the same pieces again and again, and are quicker from the heap
        mallopt(_MMAP_THRESHOLD, _MOST_FROM_HEAP)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
        trim(ctypes.c_size_t(0))
