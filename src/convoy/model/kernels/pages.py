"""Put pages of 2 MiB under packed weights, so that a decode, which reads them all, looks up fewer addresses.

oneDNN's own allocations do not ask for such pages. Allocations of a few MiB begin anywhere, so that few
whole pages lie inside one. Side by side they make one long run, for which pages are requested at once.
Linux alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence

import torch

from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.release_memory import large_apart

_PAGE = 2 << 20
# Bytes that an allocator may leave between neighbours.
_GAP = 1 << 16
# The header is the memory that an allocator keeps in front of an allocation.
_SMALL_PAGE, _HEADER = 4096, 16
# Larger weights share few pages with other memory.
_MOST_MOVED = 32 << 20
_MOST_ROOMS = 4
# MAP_PRIVATE, MAP_ANONYMOUS and MAP_NORESERVE; MAP_FIXED_NOREPLACE.
_PRIVATE, _NO_REPLACE = 0x4022, 0x100000
# MADV_HUGEPAGE; MADV_COLLAPSE, which acts at once, since Linux 6.1.
_ADVISE, _COLLAPSE = 14, 25


def ask_huge_pages(weights: Iterable[torch.Tensor]) -> int:
    """Ask for large pages under these packed weights of oneDNN. Return the number of bytes.

    The system may refuse, and then nothing changes. Contents and addresses stay.
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


def empty_on_huge_pages(num_bytes: int) -> torch.Tensor:
    """Return memory that was not written yet, uint8 [num_bytes]. Whole pages of 2 MiB are asked for.

    Memory of a page or more begins with one, so that only its end lies on small pages.
    """
    if sys.platform != "linux" or num_bytes < _PAGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    room = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    found = room[-room.data_ptr() % _PAGE :][:num_bytes]
    whole = ctypes.c_size_t(num_bytes // _PAGE * _PAGE)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(found.data_ptr()), whole, _ADVISE)
    return found


def whole_pages(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the whole large pages as runs [start, end), for (address, size) places that nearly touch."""
    runs: list[tuple[int, int]] = []
    for address, size in sorted(places):
        if runs and address - runs[-1][1] <= _GAP:
            runs[-1] = (runs[-1][0], address + size)
        else:
            runs.append((address, address + size))
    inside = [(-(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE) for start, end in runs]
    return [(start, end) for start, end in inside if start < end]


def lay_together(linears: Iterable[PackedLinear]) -> int:
    """Copy packed weights of a few MiB each so that they lie side by side. Return how many bytes now do.

    Memory freed while a model loads leaves gaps of all sizes, and the next matrix goes into one. Half of
    it may then lie on large pages that it shares with no other matrix, and is read at two thirds of the
    rate. One matrix at a time exists twice. There is no guarantee: another thread that maps memory
    meanwhile may take the place.
    """
    if sys.platform != "linux" or getattr(torch.ops.mkldnn, "data_ptr", None) is None:
        return 0
    small = [linear for linear in linears if linear.packed and all(map(_is_small, linear.packed))]
    moved = 0
    with large_apart():
        for _ in range(_MOST_ROOMS):
            done = _move(small)
            moved += sum(_bytes_of(part) for linear in small[:done] for part in linear.packed)
            small = small[done:]
    return moved


def _move(linears: Sequence[PackedLinear]) -> int:
    """Return how many linears went into one room: fewer where another thread mapped memory into it."""
    sizes = [_bytes_of(part) for linear in linears for part in linear.packed]
    if not sizes:
        return 0
    room, done = AddressRoom(sum(sizes) + _GAP * len(sizes), min(sizes)), 0
    for linear in linears:
        if not room.open():
            break
        copies = [part.clone() for part in linear.packed]
        room.close(min(torch.ops.mkldnn.data_ptr(part) for part in copies))
        linear.repack(copies)
        done += 1
    room.leave()
    return done


class AddressRoom:
    """Keep a range of addresses free for allocations that are to lie side by side.

    The system maps into the highest gap that is large enough, from above. The gaps above the room are
    therefore closed, to all threads, while the room is open. Nothing of this takes memory.
    """

    def __init__(self, num_bytes: int, least: int) -> None:
        """Reserve ``num_bytes`` of addresses.

        ``least`` is the size in bytes of the smallest allocation to come.
        """
        library = ctypes.CDLL(None, use_errno=True)
        self._map, self._unmap = library.mmap, library.munmap
        self._map.restype = ctypes.c_void_p
        self._map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._least, self._size = _whole(least), _whole(num_bytes)
        self._closed: list[tuple[int, int]] = []
        self._start = self._keep(0, self._size)
        self._end = self._start + self._size

    def open(self) -> bool:
        """Open the addresses that are left.

        Return False where none are left, or where another thread has taken them.
        """
        if not self._start or self._end - self._start < self._least:
            return False
        self._close_above()
        self._unmap(self._start, self._end - self._start)
        return True

    def close(self, lowest: int) -> None:
        """Reserve the addresses below ``lowest`` again, the address of the latest allocation."""
        if self._start <= lowest < self._end:
            self._end = (lowest - _HEADER) // _SMALL_PAGE * _SMALL_PAGE
        kept = self._keep(self._start, self._end - self._start)
        self._start = kept if kept == self._start else 0

    def leave(self) -> None:
        """Release the room and all other reserved gaps."""
        for start, num_bytes in self._closed:
            self._unmap(start, num_bytes)
        if self._start:
            self._unmap(self._start, self._end - self._start)

    def _close_above(self) -> None:
        size = self._size
        while True:
            found = self._keep(0, size)
            # Every gap above the room is filled, from large to small, until the room is the highest.
            if found > self._end:
                self._closed.append((found, size))
                continue
            if found:
                self._unmap(found, size)
            if size == self._least:
                return
            size = max(self._least, _whole(size // 2))

    def _keep(self, start: int, num_bytes: int) -> int:
        """Reserve ``num_bytes`` of addresses, at ``start`` if it is not 0. Return their address, or 0."""
        if num_bytes <= 0:
            return 0
        flags = _PRIVATE | (_NO_REPLACE if start else 0)
        found = self._map(start or None, num_bytes, 0, flags, -1, 0)
        return 0 if found in {None, ctypes.c_void_p(-1).value} else int(found)


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // _SMALL_PAGE) * _SMALL_PAGE


def _is_small(packed: torch.Tensor) -> bool:
    return _PAGE // 2 <= _bytes_of(packed) <= _MOST_MOVED


def _bytes_of(packed: torch.Tensor) -> int:
    return int(torch.ops.mkldnn._nbytes(packed))
