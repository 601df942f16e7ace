"""Large pages are asked for under runs of packed weights, and change no number."""

from __future__ import annotations

import sys

import pytest
import torch

from convoy.model.linear import PackedLinear
from convoy.model.pages import ask_huge_pages, whole_pages

PAGE = 2 << 20


def test_neighbours_make_one_run_and_what_is_alone_and_small_has_no_whole_page() -> None:
    half = PAGE // 2
    assert whole_pages([(PAGE + 16, half)]) == []
    together = [(2 * PAGE + half + 4096, half), (2 * PAGE, half), (3 * PAGE + 8192, PAGE)]
    assert whole_pages(together) == [(2 * PAGE, 4 * PAGE)]
    assert whole_pages([(PAGE, PAGE), (9 * PAGE, PAGE)]) == [(PAGE, 2 * PAGE), (9 * PAGE, 10 * PAGE)]


@pytest.mark.skipif(sys.platform != "linux", reason="such pages are asked for on Linux alone")
def test_weights_are_the_same_on_large_pages() -> None:
    linears = [PackedLinear(torch.randn(1024, 1100), None) for _ in range(4)]
    x = torch.randn(6, 1100)
    before = [linear(x) for linear in linears]
    assert ask_huge_pages(weight for linear in linears for weight in linear.packed) >= 2 * PAGE
    assert all(torch.equal(linear(x), found) for linear, found in zip(linears, before, strict=True))
