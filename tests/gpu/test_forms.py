"""Matrices in the form of a file: repacked without a change of values, and multiplied by codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, silu

from convoy.config.kernels import CARD_FORMS, KEPT_FORMS
from convoy.errors import ModelError
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
from convoy.model.kernels.stored.sample import sample_range, usual_shape
from convoy.model.quantize.search import round_matrix, rounding_sample
from support.cases import cases
from support.kernels import INTERPRETED, error_of, why_not

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from convoy.model.backends.cuda.kernels.few_rows import FEW_TILES, MAX_FEW, FewTile, few_rows, unpack
from convoy.model.backends.cuda.kernels.forms import DeviceMatrix
from convoy.model.backends.cuda.kernels.linears import multiply, multiply_in_parts
from convoy.model.backends.cuda.kernels.packing import pack_matrix, round_on_device
from convoy.model.backends.cuda.kernels.single_row import CODE_TILES, lone_linear
from support.slow_kernels import norm_slowly

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-2
EPS = 1e-5
# Inputs with and without a part of a tile at the end.
SIZES = (512, 768) if INTERPRETED else (512, 768, 4096)
# The forms that stay on the card.
KEPT = [form for form in sorted(KEPT_FORMS) if form.split(" ")[0] in CARD_FORMS and "places" not in form]
_QUICK = ("affine4", "centred4", "gguf:Q4_K", "gguf:Q6_K", "gguf:Q5_K", "MXFP4", "F8_E4M3", "centred8 zeros")
_FORMS = cases(KEPT, lambda form: form in _QUICK)


def stored(form: str, inputs: int, outputs: int = 70) -> StoredRange:
    return replace(sample_range(usual_shape(form, inputs), outputs), rounded="")


def drawn(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return numbers.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def packed(form: str, inputs: int, device: torch.device) -> DeviceMatrix:
    return pack_matrix(StoredMatrix((stored(form, inputs),)), device)


@pytest.mark.parametrize("form", KEPT)
def test_a_form_on_the_card_has_the_values_of_the_file(form: str, device: torch.device) -> None:
    one = stored(form, 512)
    found = pack_matrix(StoredMatrix((one,)), device)
    assert torch.equal(found.dense().cpu(), one.unpack())
    # One rounding: to bfloat16, in which a device computes.
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    assert torch.equal(unpack(found, dtype).cpu(), one.unpack().to(dtype))


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("inputs", SIZES)
def test_several_rows_are_multiplied_by_codes(form: str, inputs: int, device: torch.device) -> None:
    matrix, bias = packed(form, inputs, device), drawn(70, device=device, seed=3)
    dense = matrix.dense()
    for rows in (2, 17, MAX_FEW + 3):
        x = drawn(rows, inputs, device=device)
        expected = linear(x.float(), dense, bias.float())
        assert error_of(multiply(x, matrix, bias), expected) <= TOLERANCE
    x = drawn(5, inputs, device=device)
    for tile in FEW_TILES:
        found = few_rows(x, matrix, None, tile)
        assert error_of(found, linear(x.float(), dense)) <= TOLERANCE
        assert torch.equal(found, few_rows(x, matrix, None, tile)), "sums have one order"


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("inputs", SIZES)
def test_a_lone_row_is_multiplied_by_codes(form: str, inputs: int, device: torch.device) -> None:
    x, norm = drawn(1, inputs, device=device), drawn(inputs, device=device, seed=1)
    matrix, bias = packed(form, inputs, device), drawn(70, device=device, seed=3)
    dense = matrix.dense()
    full = linear(norm_slowly(x, norm, EPS).float(), dense, bias.float())
    for tile in CODE_TILES:
        gated = lone_linear(x, matrix, bias=bias, norm=norm, eps=EPS, gated=True, tile=tile)
        assert error_of(gated, silu(full[:, :35]) * full[:, 35:]) <= TOLERANCE
    residual = drawn(1, 70, device=device, seed=4)
    expected = residual.float() + full
    lone_linear(x, matrix, bias=bias, norm=norm, eps=EPS, out=residual, adds=True)
    assert error_of(residual, expected) <= TOLERANCE
    found = lone_linear(x, matrix, dtype=torch.float32)
    # Codes and scales are not rounded here. Codes of 4 bits are summed with up to 2,048 times ``x``.
    bits = matrix.ranges[0].bits
    assert error_of(found, linear(x.float(), dense)) <= (5e-5 if bits == 4 else 1e-5)


def test_a_tile_is_made_smaller_for_a_card_with_less_shared_memory() -> None:
    wide = FewTile(128, 1, 8, 3)
    assert wide.fitted(4, 200_000) == wide
    assert wide.fitted(4, 80_000) == replace(wide, inputs=128)
    assert wide.fitted(8, 80_000) == replace(wide, inputs=128, rows=32)
    # Products take at least 16 rows.
    assert wide.fitted(8, 49_152) == replace(wide, inputs=128, rows=16, num_stages=2)
    assert wide.fitted(8, 1_000) == replace(wide, inputs=128, rows=16, num_stages=1)


def test_joined_matrices_of_two_forms_are_multiplied_as_one(device: torch.device) -> None:
    """As q, k and v of a file in Q4_K_M, and as a gate and an up of two forms."""
    ranges = [stored("gguf:Q4_K", 512, 40), stored("gguf:Q4_K", 512, 24), stored("gguf:Q6_K", 512, 64)]
    matrix = pack_matrix(StoredMatrix(tuple(ranges)), device)
    assert [one.shape[0] for one in matrix.ranges] == [64, 64]
    dense, bias = torch.cat([one.unpack() for one in ranges]).to(device), drawn(128, device=device, seed=3)
    for rows in (1, 5, MAX_FEW + 3):
        x = drawn(rows, 512, device=device)
        expected = linear(x.float(), dense, bias.float())
        if rows == 1:
            assert error_of(lone_linear(x, matrix, bias=bias), expected) <= TOLERANCE
            gated = lone_linear(x, matrix, bias=bias, gated=True)
            assert error_of(gated, silu(expected[:, :64]) * expected[:, 64:]) <= TOLERANCE
        else:
            assert error_of(multiply(x, matrix, bias), expected) <= TOLERANCE
            assert error_of(multiply_in_parts(x, matrix), linear(x.float(), dense)) <= TOLERANCE


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_on_the_card_gives_the_codes_of_the_host(bits: int, device: torch.device) -> None:
    rows = rounding_sample()
    expected = round_matrix(rows, bits)
    found = round_on_device(rows.to(device), bits, "a matrix")
    (one,) = found.ranges
    assert isinstance(one, StoredRange)
    assert torch.equal(one.parts["codes"].cpu(), expected.packed(bits))
    assert torch.equal(one.parts["scales"].cpu(), expected.scales)
    assert torch.equal(pack_matrix(found, device).dense().cpu(), expected.values())


def test_a_value_that_is_not_a_number_is_not_rounded(device: torch.device) -> None:
    with pytest.raises(ModelError, match="a matrix holds a value that is not a number"):
        round_on_device(torch.full((4, 64), torch.nan, device=device), 4, "a matrix")
