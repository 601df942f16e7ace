"""4-bit linears beside what their weights were rounded to; a row's bits depend on the row alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from convoy.config.kernels import STEADY, W4A16, W8A8
from convoy.errors import SelfCheckError
from convoy.model.backends.host.checks.selfcheck import available_kernels, choose_kernel
from convoy.model.kernels import int4
from convoy.model.kernels.activation import ACTIVATIONS
from convoy.model.kernels.int4 import GROUP, Int4Linear, int4_available, round_to_4_bits
from convoy.model.kernels.int8 import Int8Linear
from convoy.model.kernels.linear import PackedLinear
from support.tiny_models import Models, Prompt, Threads

pytestmark = pytest.mark.skipif(not int4_available(), reason="this build of torch has no 4-bit linears")
SHAPES = ((64, 64), (32, 16), (96, 48), (1024, 80), (352, 128))


def int4_weight(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Unpack the result of `round_to_4_bits`, in float32 [out, in]."""
    scale, middle = scales.float().permute(2, 1, 0).unsqueeze(-1)
    groups = (numbers.view(len(numbers), -1, GROUP) - 8) * scale
    weight: torch.Tensor = (groups + middle).flatten(1)
    return weight


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_it_computes_what_its_rounded_weights_do_to_the_precision_of_bfloat16(
    width: int, outputs: int
) -> None:
    weight, bias, x = numbers(outputs, width), numbers(outputs, seed=1), numbers(17, width, seed=2)
    expected = x @ int4_weight(*round_to_4_bits(weight)).t() + bias
    found = Int4Linear(weight, bias)(x)
    assert (found - expected).norm() <= 0.005 * expected.norm()


def test_a_weight_is_off_by_half_a_step_at_most() -> None:
    weight = numbers(48, 96)
    found = int4_weight(*round_to_4_bits(weight))
    groups = weight.view(48, -1, GROUP)
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (found - weight).view(48, -1, GROUP).abs().amax(-1)
    assert (error <= 0.55 * steps).all(), "half a step, and what bfloat16 rounds"
    assert torch.equal(int4_weight(*round_to_4_bits(torch.ones(16, 32))), torch.ones(16, 32))


@pytest.mark.parametrize("activation", [None, *sorted(ACTIVATIONS)])
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_a_rows_bits_depend_on_no_other_row_and_no_thread(
    threads: Threads, width: int, outputs: int, activation: str | None
) -> None:
    linear = Int4Linear(numbers(outputs, width), numbers(outputs, seed=1), activation)
    x = numbers(70, width, seed=2)
    threads(1)
    whole = linear(x)
    for count in (1, 2):
        threads(count)
        for rows in (1, 2, 3, 4, 7, 16, 33, 70):
            for start in {0, 1, 70 - rows} if rows < 70 else {0}:
                part = slice(start, start + rows)
                assert torch.equal(linear(x[part]), whole[part]), (count, rows, start)


def test_a_weight_takes_five_bits() -> None:
    linear = Int4Linear(numbers(64, 128), None)
    assert linear.weight_bytes == 64 * 128 * 5 // 8
    assert list(linear.parameters()) == []


def test_a_stage_has_4_bits_where_the_shape_fits_and_8_in_its_output(models: Models) -> None:
    stage = models.chain("even", kernel=W4A16).stages[0]
    *layers, output = stage.linears
    assert isinstance(output, Int8Linear)
    assert all(isinstance(linear, Int4Linear | Int8Linear) for linear in layers)
    assert any(isinstance(linear, Int4Linear) for linear in layers)
    assert not any(type(linear) is PackedLinear for linear in layers)


@pytest.mark.parametrize("kernel", [W8A8, W4A16])
def test_guesses_may_be_checked_as_one_row_because_chunks_change_no_bit(
    models: Models, prompt: Prompt, threads: Threads, kernel: str
) -> None:
    assert kernel in STEADY
    tokens = prompt(40)
    threads(1)
    chain = models.chain("even", kernel=kernel)
    (whole,) = chain.run((0, tokens))
    for sequence, sizes in enumerate(([9, 1, 30], [1, 8, 31]), start=1):
        parts, start = [], 0
        for size in sizes:
            parts += chain.run((sequence, tokens[start : start + size]))
            start += size
        assert torch.equal(torch.cat(parts), whole), sizes


def test_it_is_offered_last_and_only_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_kernels("auto", 1)[-1] == W4A16
    assert available_kernels(W4A16, 1) == [W4A16]
    monkeypatch.setattr(int4, "KERNEL", replace(int4.KERNEL, is_available=lambda: False))
    assert W4A16 not in available_kernels("auto", 1)
    with pytest.raises(SelfCheckError, match="no 4-bit"):
        choose_kernel(W4A16, 1)
