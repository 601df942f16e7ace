"""Pages of 2 MiB under packed weights: a decode reads all of them, and looks up fewer addresses.

oneDNN's own allocations do not ask for such pages, and those of a few MiB each begin anywhere, so that few
whole pages lie inside one. Side by side they make one long run, which is asked for at once. Linux alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch

_PAGE = 2 << 20
_GAP = 1 << 16  # bytes of an allocator between neighbours
_ADVISE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE; MADV_COLLAPSE does it now, since Linux 6.1


def ask_huge_pages(weights: Iterable[torch.Tensor]) -> int:
    """Ask for large pages under these packed weights of oneDNN, and say for how many bytes.

    A wish: where the system refuses, nothing changes. Contents and addresses stay.
    """
    pointer = getattr(torch.ops.mkldnn, "data_ptr", None)
    if sys.platform != "linux" or pointer is None:
        return 0
    madvise = ctypes.CDLL(None).madvise
    asked = 0
    for start, end in whole_pages((pointer(weight), 4 * weight.numel()) for weight in weights):
        for advice in (_ADVISE, _COLLAPSE):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
        asked += end - start
    return asked


def whole_pages(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The whole large pages, as runs [start, end), of (address, size) that lie side by side or nearly so."""
    runs: list[tuple[int, int]] = []
    for address, size in sorted(places):
        if runs and address - runs[-1][1] <= _GAP:
            runs[-1] = (runs[-1][0], address + size)
        else:
            runs.append((address, address + size))
    inside = [(-(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE) for start, end in runs]
    return [(start, end) for start, end in inside if start < end]
