"""Large pages are asked for under runs of packed weights, and change no number."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.pages import AddressRoom, ask_huge_pages, lay_together, whole_pages
from convoy.model.kernels.stored.linear import StoredLinear
from convoy.model.kernels.stored.weights import plain_matrix

PAGE = 2 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="pages and addresses are asked for on Linux alone")


def test_neighbours_make_one_run_and_what_is_alone_and_small_has_no_whole_page() -> None:
    half = PAGE // 2
    assert whole_pages([(PAGE + 16, half)]) == []
    together = [(2 * PAGE + half + 4096, half), (2 * PAGE, half), (3 * PAGE + 8192, PAGE)]
    assert whole_pages(together) == [(2 * PAGE, 4 * PAGE)]
    assert whole_pages([(PAGE, PAGE), (9 * PAGE, PAGE)]) == [(PAGE, 2 * PAGE), (9 * PAGE, 10 * PAGE)]


@linux
def test_weights_are_the_same_on_large_pages() -> None:
    linears = [PackedLinear(torch.randn(1024, 1100), None) for _ in range(4)]
    x = torch.randn(6, 1100)
    before = [linear(x) for linear in linears]
    assert ask_huge_pages(weight for linear in linears for weight in linear.packed) >= 2 * PAGE
    assert all(torch.equal(linear(x), found) for linear, found in zip(linears, before, strict=True))


@linux
def test_what_is_mapped_into_a_room_lies_side_by_side_whatever_gaps_there_are() -> None:
    size = 3 << 20
    gaps = [mmap.mmap(-1, size) for _ in range(9)]
    for gap in gaps[1::2]:
        gap.close()
    room, held, places = AddressRoom(4 * (size + 4096), size), [], []
    for _ in range(4):
        assert room.open()
        held.append(mmap.mmap(-1, size))
        places.append(ctypes.addressof(ctypes.c_char.from_buffer(held[-1])))
        room.close(places[-1] + 16)
    assert places == [places[0] - number * size for number in range(4)]
    # The rest is too small.
    assert not room.open()
    room.leave()


@linux
def test_weights_that_are_laid_together_are_the_same() -> None:
    linears = [PackedLinear(torch.randn(600, 1100), torch.randn(600)) for _ in range(3)]
    x = torch.randn(6, 1100)
    before = [linear(x) for linear in linears]
    assert lay_together(linears) == 3 * torch.ops.mkldnn._nbytes(linears[0].packed[0])
    assert all(torch.equal(linear(x), found) for linear, found in zip(linears, before, strict=True))
    assert all(
        linear.native is None or torch.equal(linear(x[:1]), found[:1])
        for linear, found in zip(linears, before, strict=True)
    )


def test_what_is_no_packed_matrix_of_some_mebibytes_stays_where_it_is() -> None:
    assert (
        lay_together(
            [PackedLinear(torch.randn(64, 96), None), StoredLinear(plain_matrix(torch.randn(64, 96)), None)]
        )
        == 0
    )
