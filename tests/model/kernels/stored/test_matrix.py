"""A stored matrix unpacks as its reader does, in any order of outputs and cut of inputs at blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from convoy.errors import ModelError
from convoy.model.kernels.stored.linear import StoredLinear, stored_linear
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _joined() -> tuple[StoredMatrix, torch.Tensor]:
    """Return 40 outputs in bfloat16 above 30 in Q8_0, of 64 inputs, and their values."""
    floats, quantised = _numbers(40, 64).to(torch.bfloat16), _numbers(30, 64).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.quantize(quantised, kind)
    values = (floats.float(), torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    bf16 = StoredMatrix((StoredRange("BF16", 40, 64, {"values": floats}),))
    q8 = StoredMatrix((StoredRange("gguf:Q8_0", 30, 64, {"stored": torch.from_numpy(stored)}),))
    return StoredMatrix.joined([bf16, q8]), torch.cat(values)


def test_ranges_of_two_forms_unpack_as_one_matrix_in_any_order() -> None:
    matrix, values = _joined()
    assert matrix.shape == (70, 64)
    assert matrix.num_bytes == 40 * 128 + 30 * 68
    assert torch.equal(matrix.dense(), values)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(matrix.rows(order).dense(), values[order])
    assert torch.equal(matrix.rows(slice(35, 52)).dense(), values[35:52])
    assert torch.equal(matrix.row_values(order[:9]), values[order[:9]])


def test_inputs_are_cut_at_blocks_or_refused() -> None:
    matrix, values = _joined()
    assert torch.equal(matrix.columns(slice(32, 64)).dense(), values[:, 32:])
    with pytest.raises(ModelError, match=r"gguf:Q8_0 cannot be cut into inputs 0 to 16"):
        matrix.columns(slice(0, 16))


def test_parts_of_other_shapes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"shape \[3, 64\], for 4 outputs"):
        StoredMatrix((StoredRange("BF16", 4, 64, {"values": torch.zeros(3, 64)}),))


def test_groups_unpack_with_two_roundings_and_a_group_for_each_input() -> None:
    generator = np.random.default_rng(5)
    codes = torch.from_numpy(generator.integers(0, 256, (6, 32), dtype=np.uint8))
    scales, biases = _numbers(6, 2), _numbers(6, 2).to(torch.float16)
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float()
    affine = StoredRange("affine4", 6, 64, {"codes": codes, "scales": scales, "biases": biases}, 32)
    spread = [part.float().repeat_interleave(32, 1) for part in (scales, biases)]
    assert torch.equal(affine.unpack(), numbers * spread[0] + spread[1])
    places = torch.arange(64) % 2
    ordered = StoredRange("centred4", 6, 64, {"codes": codes, "scales": scales, "places": places}, 32)
    assert torch.equal(ordered.unpack(), (numbers - 8) * scales[:, places])
    assert torch.equal(ordered.columns(32, 64).unpack(), ordered.unpack()[:, 32:])


@pytest.mark.parametrize("num_rows", [1, 9])
def test_linear_has_the_bits_of_the_unpacked_matrix(num_rows: int) -> None:
    matrix, values = _joined()
    bias, x = _numbers(70), _numbers(num_rows, 64)
    expected = stored_linear(values, bias, "silu")
    x_padded = torch.cat((x, x[-1:].expand(8, -1)))
    found = StoredLinear(matrix, bias, "silu")
    assert torch.equal(found(x), expected(x_padded)[:num_rows])
    assert torch.equal(found.dense()[0], values)


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ("gguf:Q8_0", {"stored": torch.zeros(4, 67, dtype=torch.uint8)}),
        ("affine4", {"codes": torch.zeros(4, 31, dtype=torch.uint8), "scales": torch.zeros(4, 2)}),
        ("affine4", {"codes": torch.zeros(4, 32, dtype=torch.uint8), "scales": torch.zeros(4, 3)}),
        ("F8_E4M3", {"values": torch.zeros(4, 63, dtype=torch.uint8), "scales": torch.zeros(4, 1)}),
        ("MXFP4", {"scales": torch.zeros(4, 2, dtype=torch.uint8)}),
    ],
)
def test_parts_that_are_too_narrow_are_refused_before_an_address_is_taken(
    form: str, parts: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(ModelError, match=form):
        StoredMatrix((StoredRange(form, 4, 64, parts, 32),))
