"""8-bit linears against a slow reference, and what a row's bits depend on: nothing but the row."""

from __future__ import annotations

import pytest
import torch

from convoy.config.kernels import W4A16, W8A8
from convoy.errors import SelfCheckError
from convoy.model.backends.host.checks.selfcheck import available_kernels, choose_kernel
from convoy.model.kernels.activation import ACTIVATIONS
from convoy.model.kernels.int8 import MAX_INPUTS, Int8Linear, int8_linear, round_weight
from convoy.model.kernels.linear import PackedLinear, w8a8_available
from convoy.model.kernels.native.library import native_libraries
from support.tiny_models import Models, Threads

pytestmark = pytest.mark.skipif(not w8a8_available(), reason="this build of torch has no 8-bit linears")
SHAPES = ((40, 105), (44, 40), (256, 704), (1031, 33), (1024, 2816), (2, 2))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 70])
def test_it_computes_what_the_slow_reference_does(width: int, outputs: int, rows: int) -> None:
    weight, bias, x = numbers(outputs, width), numbers(outputs, seed=1), numbers(rows, width, seed=2)
    rounded, scale = round_weight(weight)
    found = Int8Linear(weight, bias)(x)
    expected = int8_linear(x, rounded, scale, bias)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_all_kernels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, width: int, outputs: int) -> None:
    weight, x = numbers(outputs, width), numbers(17, width, seed=2)
    found = Int8Linear(weight, None, offered=())(x)
    for compiled in native_libraries():
        assert torch.equal(Int8Linear(weight, None, offered=(compiled,))(x), found)
    monkeypatch.setattr("convoy.model.kernels.int8.fbgemm_holds", lambda: False)
    assert torch.equal(Int8Linear(weight, None, offered=())(x), found)


def test_rounding_costs_about_a_hundredth() -> None:
    weight, x = numbers(704, 1024), numbers(64, 1024, seed=2)
    exact = x @ weight.t()
    error = (Int8Linear(weight, None)(x) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.001 < error < 0.015


def test_the_greatest_numbers_do_not_overflow() -> None:
    width = 20_000
    assert width < MAX_INPUTS
    weight, x = torch.full((16, width), 3.0), torch.full((5, width), -2.0)
    assert torch.allclose(Int8Linear(weight, None)(x), torch.full((5, 16), -6.0 * width), rtol=1e-5)


@pytest.mark.parametrize("activation", [None, *sorted(ACTIVATIONS)])
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_a_rows_bits_depend_on_no_other_row_and_no_thread(
    threads: Threads, width: int, outputs: int, activation: str | None
) -> None:
    linear = Int8Linear(numbers(outputs, width), numbers(outputs, seed=1), activation)
    x = numbers(70, width, seed=2)
    threads(1)
    whole = linear(x)
    for count in (1, 2):
        threads(count)
        assert torch.equal(linear(x), whole)
        for rows in (1, 2, 3, 4, 7, 16, 33):
            for start in (0, 1, 5, 70 - rows):
                part = slice(start, start + rows)
                assert torch.equal(linear(x[part]), whole[part]), (count, rows, start)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations_are_the_librarys(activation: str) -> None:
    from transformers.activations import ACT2FN

    weight, x = numbers(64, 32), 3 * numbers(20, 32, seed=2)
    plain = Int8Linear(weight, None)(x)
    found = Int8Linear(weight, None, activation)(x)
    assert (found - ACT2FN[activation](plain)).abs().max() <= 1e-5


def test_a_row_of_zeros_gives_the_bias_and_its_neighbours_what_they_are() -> None:
    weight, bias, x = numbers(9, 12), numbers(9, seed=1), numbers(3, 12, seed=2)
    linear = Int8Linear(weight, bias)
    x[1] = 0
    found = linear(x)
    assert torch.equal(found[1], bias)
    assert torch.equal(found[2], linear(x[2:])[0])


def test_what_is_not_finite_stays_so_in_its_row_alone() -> None:
    linear = Int8Linear(numbers(9, 12), None)
    x = numbers(3, 12, seed=2)
    expected = linear(x)
    x[1, 3] = torch.nan
    found = linear(x)
    assert torch.isnan(found[1]).all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_it_holds_a_byte_for_each_weight_and_a_scale_for_each_output() -> None:
    linear = Int8Linear(numbers(30, 50), numbers(30))
    assert linear.weight_bytes == 30 * 50 + 4 * 30 + 4 * 30
    assert list(linear.parameters()) == []


def test_all_linears_of_a_stage_are_rounded_and_its_bytes_are_theirs(models: Models) -> None:
    exact, rounded = (models.chain("odd", kernel=kernel).stages[0] for kernel in ("exact-f32", "w8a8"))
    linears = [part for layer in rounded.layers.values() for part in layer.modules()]
    linears = [part for part in linears if isinstance(part, PackedLinear)]
    assert len(linears) >= 4 * 4
    assert all(isinstance(part, Int8Linear) for part in linears)
    assert rounded.weight_bytes < 0.5 * exact.weight_bytes, "a tiny model is half embedding and scales"


def test_a_packed_linear_unpacks_to_what_it_was_given() -> None:
    for width, outputs in SHAPES:
        weight, bias = numbers(outputs, width), numbers(outputs, seed=1)
        unpacked, kept = PackedLinear(weight, bias).dense()
        assert torch.equal(unpacked, weight)
        assert kept is not None
        assert torch.equal(kept, bias)


def test_w8a8_is_offered_last_and_only_asked_for_by_name() -> None:
    assert choose_kernel("auto", 1) != W8A8
    assert available_kernels("auto", 1)[-2:] == [W8A8, W4A16]
    assert available_kernels(W8A8, 1) == [W8A8]


def test_a_machine_without_the_operators_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    with pytest.raises(SelfCheckError, match="no "):
        choose_kernel(W8A8, 1)
    assert W8A8 not in available_kernels("auto", 1)
