"""Repack stored matrices into the card's layouts, without a change of any value.

`ROWS` has a function for each form that has a layout. Forms without one are unpacked to bfloat16 as they are
loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from convoy.errors import ModelError
from convoy.model.backends.cuda.kernels.forms import RUN, UNIT, DeviceMatrix, DeviceRange
from convoy.model.kernels.stored.bits import stream_codes
from convoy.model.kernels.stored.matrix import GGUF, PLACES, StoredMatrix, StoredRange
from convoy.model.quantize.load import stored_range
from convoy.model.quantize.search import round_matrix

# Weights repacked at a time. Their codes take a byte each meanwhile, and a few times that between.
_PIECE_ELEMENTS = 1 << 24
# Groups of fewer inputs have no layout: a word of codes lies in one group.
_LEAST_GROUP = 16
_FOUR_BITS = frozenset({"centred4", "affine4"})
_Pack = Callable[[StoredRange], DeviceRange]


def has_layout(matrix: StoredMatrix) -> bool:
    """Return whether the card has a layout for every range of ``matrix``."""
    return all(isinstance(one, StoredRange) and _layout_fits(one) for one in matrix.ranges)


def pack_matrix(matrix: StoredMatrix, device: torch.device) -> DeviceMatrix:
    """Return a matrix for which `has_layout` is true, on ``device``."""
    found = []
    for one in matrix.ranges:
        assert isinstance(one, StoredRange), "has_layout says so"
        step = max(1, _PIECE_ELEMENTS // one.inputs)
        for start in range(0, one.outputs, step):
            some = one.rows(slice(start, start + step))
            parts = {role: part.to(device) for role, part in some.parts.items()}
            found.append(ROWS[one.form](StoredRange(some.form, some.outputs, some.inputs, parts, some.group)))
    return DeviceMatrix.joined(found)


def round_on_device(values: torch.Tensor, bits: int, name: str) -> StoredMatrix:
    """Return [outputs, inputs] on its device, rounded to 8 or 4 bits as `convoy quantize` rounds it.

    Raises ModelError, naming the matrix, for a value that is not a number.
    """
    found = round_matrix(values, bits)
    if not math.isfinite(found.error):
        raise ModelError(f"{name} holds a value that is not a number")
    return StoredMatrix((stored_range(found.packed(bits), found.scales, bits),))


def _layout_fits(one: StoredRange) -> bool:
    if one.form not in ROWS or PLACES in one.parts or one.inputs % UNIT:
        return False
    group = one.group or one.inputs
    if "zeros" in one.parts and one.parts["zeros"].dtype.is_floating_point:
        return False
    least = UNIT if one.form in _FOUR_BITS else _LEAST_GROUP
    return group % least == 0 and one.inputs % group == 0


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes, uint8 [outputs, inputs], as int16 words [outputs, inputs / 4]."""
    outputs, inputs = codes.shape
    units = codes.view(outputs, -1, 4, RUN).to(torch.int16)
    words = units[:, :, 0] | units[:, :, 1] << 4 | units[:, :, 2] << 8 | units[:, :, 3] << 12
    return words.view(outputs, inputs // 4)


def _of_codes(
    one: StoredRange,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    bits: int,
    group: int,
    zero: int = 0,
    least: torch.Tensor | None = None,
    outers: torch.Tensor | None = None,
    outer_least: torch.Tensor | None = None,
) -> DeviceRange:
    """Return a range of uint8 codes [outputs, inputs], or of 8-bit numbers as they are."""
    if bits == 4:
        codes = pack_codes(codes)
    elif codes.dtype == torch.uint8:
        codes = (codes.to(torch.int16) - 128).to(torch.int8)
        zero -= 128
    groups = one.inputs // group
    if scales.shape[1] == 1 and groups > 1:
        scales = scales.expand(-1, groups)
    return DeviceRange(
        *(codes.contiguous(), scales.contiguous()),
        *(_packed(least), _packed(outers), _packed(outer_least)),
        *(bits, group, zero),
    )


def _packed(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.contiguous()


def _centred(one: StoredRange, bits: int) -> DeviceRange:
    codes = stream_codes(one.parts["codes"], bits)[:, : one.inputs]
    half, group, zeros = 1 << (bits - 1), one.group or one.inputs, one.parts.get("zeros")
    if zeros is None:
        return _of_codes(one, codes, one.parts["scales"], bits=bits, group=group, zero=half)
    whole = zeros.to(torch.int16) + (half if zeros.dtype == torch.int8 else 0)
    return _of_codes(one, codes, one.parts["scales"], bits=bits, group=group, least=whole.to(torch.uint8))


def _affine(one: StoredRange, bits: int) -> DeviceRange:
    codes = stream_codes(one.parts["codes"], bits)[:, : one.inputs]
    scales, least = one.parts["scales"], one.parts["biases"]
    return _of_codes(one, codes, scales, bits=bits, group=one.group or one.inputs, least=least)


def _numbers(one: StoredRange) -> DeviceRange:
    """Pack whole numbers or floats of 8 bits."""
    values, zeros = one.parts["values"], one.parts.get("zeros")
    group, scales = one.group or one.inputs, one.parts["scales"]
    if zeros is None:
        return _of_codes(one, values, scales, bits=8, group=group)
    whole = (zeros.to(torch.int16) + 128).to(torch.uint8)
    return _of_codes(one, values, scales, bits=8, group=group, least=whole, zero=-128)


def _blocks(one: StoredRange, num_bytes: int) -> torch.Tensor:
    """Return the blocks of ggml's type, uint8 [outputs, blocks, bytes]."""
    return one.parts["stored"].contiguous().view(one.outputs, -1, num_bytes)


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the float16 number of each block at a byte, [outputs, blocks]."""
    return blocks[:, :, first : first + 2].contiguous().view(torch.float16).squeeze(-1)


def _q4_0(one: StoredRange) -> DeviceRange:
    blocks = _blocks(one, 18)
    packed = blocks[:, :, 2:]
    codes = torch.cat((packed & 15, packed >> 4), -1).view(one.outputs, one.inputs)
    return _of_codes(one, codes, _halves(blocks, 0), bits=4, group=32, zero=8)


def _q8_0(one: StoredRange) -> DeviceRange:
    blocks = _blocks(one, 34)
    codes = blocks[:, :, 2:].contiguous().view(torch.int8).view(one.outputs, one.inputs)
    return _of_codes(one, codes, _halves(blocks, 0), bits=8, group=32)


def _q4_k(one: StoredRange) -> DeviceRange:
    """Pack super-blocks of 256: eight pairs of 6-bit scales and least numbers under two float16 factors."""
    blocks = _blocks(one, 144)
    low, middle, high = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    least = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    packed = blocks[:, :, 16:].view(one.outputs, -1, 4, 32)
    codes = torch.stack((packed & 15, packed >> 4), 3).view(one.outputs, one.inputs)
    return _of_codes(
        *(one, codes, scales.flatten(1)), bits=4, group=32, least=least.flatten(1),
        outers=_halves(blocks, 0), outer_least=-_halves(blocks, 2),
    )  # fmt: skip


def _q6_k(one: StoredRange) -> DeviceRange:
    """Pack super-blocks of 256: 16 scales of 8 bits under a float16 factor. A code takes a byte here."""
    blocks = _blocks(one, 210)
    low = blocks[:, :, :128].view(one.outputs, -1, 2, 64)
    high = blocks[:, :, 128:192].view(one.outputs, -1, 2, 32)
    # A half of the block has 128 codes, in four runs of 32.
    lower = torch.cat((low & 15, low >> 4), -1).view(one.outputs, -1, 2, 4, 32)
    upper = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 3)
    codes = (lower | upper << 4).view(one.outputs, one.inputs)
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    whole = (codes.to(torch.int16) - 32).to(torch.int8)
    return _of_codes(one, whole, scales, bits=8, group=16, outers=_halves(blocks, 208))


ROWS: dict[str, _Pack] = {
    **{f"centred{bits}": partial(_centred, bits=bits) for bits in (4, 8)},
    **{f"affine{bits}": partial(_affine, bits=bits) for bits in (4, 8)},
    **dict.fromkeys(("I8", "F8_E4M3"), _numbers),
    f"{GGUF}Q4_0": _q4_0,
    f"{GGUF}Q8_0": _q8_0,
    f"{GGUF}Q4_K": _q4_k,
    f"{GGUF}Q6_K": _q6_k,
}
