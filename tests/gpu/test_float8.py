"""Floats of 8 bits: weights and rows rounded with a scale each, and their products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from convoy.config.kernels import CUDA_FP8, form_of
from convoy.errors import ModelError
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.wire.messages.control import StageAssignment
from support.kernels import error_of, why_not
from support.quantised_models import Quantise, fp8, mlx, write

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from convoy.model.backends.cuda.kernels.float8 import (
    few_float8,
    float8_tile,
    multiply_float8,
    round_rows,
    round_to_float8,
)
from convoy.model.backends.cuda.kernels.forms import DeviceMatrix
from convoy.model.backends.cuda.kernels.linears import multiply
from convoy.model.backends.cuda.kernels.pointwise import add_norm, add_norm_rounded, gate, gate_rounded
from convoy.model.backends.cuda.memory.weights import StageWeights, load_weights

pytestmark = pytest.mark.gpu
# Half of E4M3's step between numbers.
STEP = 2**-4


def drawn(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


@pytest.mark.parametrize("inputs", [64, 768, 14336])
def test_rows_are_rounded_by_themselves(inputs: int, device: torch.device) -> None:
    x = (
        drawn(9, inputs, device=device)
        * torch.logspace(-3, 3, 9, device=device, dtype=torch.bfloat16)[:, None]
    )
    x[4] = 0
    rounded = round_rows(x)
    greatest = x.abs().amax(1).float()
    assert torch.allclose(rounded.scales[:, 0] * 448, torch.where(greatest > 0, greatest, 448))
    found = rounded.dense()
    assert bool(((found - x.float()).abs() <= STEP * x.float().abs() + 1e-3 * greatest[:, None]).all())
    alone = round_rows(x[2:3].contiguous())
    assert torch.equal(alone.dense(), found[2:3])


def test_norms_and_gates_are_rounded_in_one_pass(device: torch.device) -> None:
    x, delta, weight = (
        drawn(*shape, device=device, seed=n) for n, shape in enumerate([(7, 768)] * 2 + [(768,)])
    )
    other = x.clone()
    found = add_norm_rounded(x, delta, weight, 1e-5)
    expected = round_rows(add_norm(other, delta, weight, 1e-5))
    assert torch.equal(x, other), "the sum is the residual"
    # Both are rounded once to bfloat16 less, so a number may become its neighbour.
    assert error_of(found.dense(), expected.dense()) <= 2 * STEP
    assert error_of(gate_rounded(x).dense(), round_rows(gate(x)).dense()) <= 2 * STEP


@pytest.mark.parametrize("rows", [2, 17, 300])
def test_products_are_those_of_the_rounded_numbers(rows: int, device: torch.device) -> None:
    x, weight, bias = (
        drawn(*shape, device=device, seed=n) for n, shape in enumerate([(rows, 768), (96, 768), (96,)])
    )
    matrix = round_to_float8(weight, "a matrix")
    expected = linear(round_rows(x).dense(), matrix.dense(), bias.float())
    assert error_of(multiply_float8(x, matrix, bias), expected) <= 1e-2
    assert torch.equal(multiply(x, matrix, bias), multiply_float8(x, matrix, bias)), (
        "the mode is the matrix's"
    )
    assert error_of(multiply_float8(x, matrix, None), linear(x.float(), weight.float())) <= 0.1


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 1024), (4096, 1024), (512, 2048)])
@pytest.mark.parametrize("rows", [2, 17, 64, 200])
def test_our_own_product_is_the_librarys(rows: int, outputs: int, inputs: int, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("Triton's interpreter has no products of 8-bit floats")
    bias = drawn(outputs, device=device, seed=2)
    one = round_to_float8(drawn(outputs, inputs, device=device, seed=1), "a matrix")
    x = round_rows(drawn(rows, inputs, device=device))
    expected = linear(x.dense(), one.dense(), bias.float())
    tile = float8_tile(rows, outputs, inputs)
    if tile is None:
        assert rows > 64, "few rows are our own kernel's"
        pytest.skip("the library's product takes less time")
    for splits in (1, 2, 4):
        found = few_float8(x, one.ranges[0], bias, replace(tile, splits=splits))
        assert error_of(found, expected) <= 1e-2
        assert torch.equal(found, few_float8(x, one.ranges[0], bias, replace(tile, splits=splits)))


def test_a_value_that_is_no_number_is_not_rounded(device: torch.device) -> None:
    with pytest.raises(ModelError, match="a matrix holds a value that is not a number"):
        round_to_float8(torch.full((16, 32), torch.nan, device=device), "a matrix")


def loaded(source: ModelSource, device: torch.device) -> StageWeights:
    assignment = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    return load_weights(source, assignment, device, None, form=form_of(CUDA_FP8))


@pytest.mark.parametrize("how", [mlx(4, 64), fp8(None), fp8((64, 64))], ids=["mlx 4", "rows", "squares"])
def test_linears_are_floats_of_8_bits_and_the_output_is_not(
    how: Quantise, tmp_path: Path, device: torch.device
) -> None:
    source = ModelSource.resolve(str(write(tmp_path, "llama", how).quantised))
    weights, num_layers = loaded(source, device), source.spec.num_layers
    assert weights.weight_bytes == source.spec.weight_bytes(
        0, num_layers, embed=True, output=True, dtype=CUDA_FP8
    ), "the plan counts what is held"
    assert isinstance(weights.head, torch.Tensor)
    down, name = weights.layers[1].down, "model.layers.1.mlp.down_proj.weight"
    assert isinstance(down, DeviceMatrix)
    assert down.rounds_rows
    expected = read_tensor(source, name).float()
    difference = (down.dense().cpu() - expected).abs()
    # Floats of a file with a scale for each output stay; others are rounded to bfloat16 before.
    is_kept = source.layout.made[name].kept_form == "F8_E4M3" and not source.layout.made[name].kept_group
    most = 2**-8 if is_kept else STEP + 2**-8
    assert bool((difference <= most * expected.abs() + 1e-3 * expected.abs().amax(1, keepdim=True)).all())
