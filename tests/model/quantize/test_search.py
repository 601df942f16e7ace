"""The search for scales: less weighted error than rounding to the nearest, and the same result each time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch

from convoy.model.kernels.native.library import native_libraries, native_library, why_no_native
from convoy.model.quantize.search import (
    GROUP,
    RoundedMatrix,
    input_weights,
    round_by_library,
    round_by_torch,
    round_matrix,
    rounding_library,
    rounding_sample,
)
from support.compiled import faulty

compiled = pytest.mark.skipif(native_library() is None, reason=f"nothing is compiled: {why_no_native()}")


def matrix(kind: str) -> torch.Tensor:
    """Return 96 rows of 256 inputs, with columns of unequal sizes."""
    draws = torch.Generator().manual_seed(7)
    values: torch.Tensor = torch.randn(96, 256, generator=draws)
    if kind == "heavy-tailed":
        values = values / torch.rand(96, 256, generator=draws).clamp(1e-3)
    return values * torch.rand(256, generator=draws) * 0.02


def nearest(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values rounded to the nearest, with the greatest magnitude of a group at the last code."""
    last = 2 ** (bits - 1) - 1
    groups = values.view(len(values), -1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) / last).bfloat16().float()
    rounded: torch.Tensor = (groups / scales).round().clamp(-last - 1, last) * scales
    return rounded.flatten(1)


@pytest.mark.parametrize("kind", ["random", "heavy-tailed"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_search_has_less_weighted_error_than_rounding_to_the_nearest(kind: str, bits: int) -> None:
    values = matrix(kind)
    weights = input_weights(values)
    found = round_matrix(values, bits)
    errors, plain = (
        ((values - own).square() * weights).view(len(values), -1, GROUP).sum(-1).double()
        for own in (found.values(), nearest(values, bits))
    )
    assert bool((errors <= plain).all())
    assert float(errors.sum()) < 0.9 * float(plain.sum())
    assert found.error == pytest.approx(float(errors.sum()), rel=1e-4)
    assert found.nearest_error == pytest.approx(float(plain.sum()), rel=1e-4)
    assert found.square == pytest.approx(float((values.square() * weights).sum()), rel=1e-4)


def test_a_row_has_the_same_codes_alone_and_in_every_type_that_holds_it() -> None:
    values = matrix("random").bfloat16()
    weights = input_weights(values)
    whole = round_matrix(values, 4, weights)
    alone = round_matrix(values[17:18].float(), 4, weights)
    assert torch.equal(whole.codes[17:18], alone.codes)
    assert torch.equal(whole.scales[17:18], alone.scales)
    again = round_matrix(values, 4)
    assert torch.equal(whole.codes, again.codes)
    assert torch.equal(whole.scales, again.scales)


def test_an_input_that_counts_more_is_rounded_better() -> None:
    values = matrix("random")
    weights = torch.ones(256)
    weights[::GROUP] = 1000.0
    column = slice(None, None, GROUP)
    even, weighted = (round_matrix(values, 4, own).values() for own in (torch.ones(256), weights))
    before, after = ((values - own)[:, column].square().sum() for own in (even, weighted))
    assert after < 0.5 * before


def test_groups_of_zeros_and_of_tiny_values_become_zeros() -> None:
    values = matrix("random")[:2]
    values[0, :GROUP] = 0
    values[1, :GROUP] = 1e-38
    found = round_matrix(values, 4)
    assert not found.values()[:, :GROUP].any()
    assert bool(torch.isfinite(found.scales).all())
    assert round_matrix(torch.zeros(2, GROUP), 8).error == 0


def test_codes_are_packed_from_the_lowest_bits_with_half_of_their_range_added() -> None:
    found = round_matrix(torch.linspace(-1, 1, GROUP).view(1, GROUP), 4)
    words = [int(word) & 0xFFFFFFFF for word in found.packed(4)[0]]
    codes = [(word >> shift) % 16 - 8 for word in words for shift in range(0, 32, 4)]
    assert codes == found.codes[0].tolist()
    assert found.packed(8).shape == (1, GROUP // 4)


def odd_groups() -> torch.Tensor:
    """Return rows with one group of random numbers each, and others of zeros, of tiny numbers or alike."""
    values = torch.randn(7, 5 * GROUP, generator=torch.Generator().manual_seed(3))
    values[0, GROUP:] = 0.0
    values[1, GROUP:] = -0.0
    values[2, GROUP:] = torch.finfo(torch.float32).smallest_normal / 64
    values[3, GROUP:] = 0.25
    # Squares of sums are infinite, or zero.
    values[4] *= 1e18
    values[5] *= 1e-25
    # Halves of codes, which round to even ones.
    values[6] = (torch.arange(5 * GROUP) % 29 - 14) / 2
    return values


@compiled
@pytest.mark.parametrize("bits", [4, 8])
def test_compiled_code_has_the_codes_scales_and_errors_of_the_operators_of_torch(bits: int) -> None:
    for rows in (rounding_sample(), matrix("heavy-tailed"), odd_groups()):
        weights = torch.linspace(0, 2, rows.shape[1])
        expected = round_by_torch(rows, weights, bits)
        for library in native_libraries():
            found = round_by_library(library, rows, weights, bits)
            assert torch.equal(found.codes, expected.codes)
            assert torch.equal(found.scales, expected.scales)
            errors = (found.square, found.error, found.nearest_error)
            assert errors == (expected.square, expected.error, expected.nearest_error)


@compiled
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_value_that_is_no_number_gives_an_error_that_is_none(value: float) -> None:
    rows = matrix("random")
    rows[5, 40] = value
    ways: list[Callable[..., RoundedMatrix]] = [round_by_torch]
    ways += [functools.partial(round_by_library, one) for one in native_libraries()]
    assert not any(math.isfinite(way(rows, torch.ones(256), 4).error) for way in ways)


@compiled
def test_compiled_code_with_another_code_is_not_used() -> None:
    libraries = tuple(native_libraries())
    wrong = faulty(libraries[0], "convoy_round", 1)
    assert rounding_library(4, (wrong, libraries[-1])) is libraries[-1]
    assert rounding_library(4, (wrong,)) is None
