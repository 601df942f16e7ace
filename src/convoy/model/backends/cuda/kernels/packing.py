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
from convoy.model.kernels.stored.matrix import (
    E2M1,
    E8M0_BIAS,
    GGUF,
    PLACES,
    SCALE_VALUES,
    StoredMatrix,
    StoredRange,
)
from convoy.model.quantize.load import stored_range
from convoy.model.quantize.search import round_matrix

# Weights repacked at a time. Their codes take a byte each meanwhile, and a few times that between.
_PIECE_ELEMENTS = 1 << 24
# Groups of fewer inputs have no layout: a word of codes lies in one group.
_LEAST_GROUP = 16
_FOUR_BITS = frozenset({"centred2", "centred4", "affine2", "affine3", "affine4"})
_TWICE_E2M1 = tuple(int(2 * value) for value in E2M1)
# The values of codes in IQ4_NL and IQ4_XS.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
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
    scales, width = one.parts["scales"], 4 if bits <= 4 else 8
    if zeros is None:
        return _of_codes(one, codes, scales, bits=width, group=group, zero=half)
    whole = zeros.to(torch.int16) + (half if zeros.dtype == torch.int8 else 0)
    return _of_codes(one, codes, scales, bits=width, group=group, least=whole.to(torch.uint8))


def _affine(one: StoredRange, bits: int) -> DeviceRange:
    codes = stream_codes(one.parts["codes"], bits)[:, : one.inputs]
    scales, least, width = one.parts["scales"], one.parts["biases"], 4 if bits <= 4 else 8
    return _of_codes(one, codes, scales, bits=width, group=one.group or one.inputs, least=least)


def _numbers(one: StoredRange) -> DeviceRange:
    """Pack whole numbers or floats of 8 bits."""
    values, zeros = one.parts["values"], one.parts.get("zeros")
    group, scales = one.group or one.inputs, one.parts["scales"]
    if zeros is None:
        return _of_codes(one, values, scales, bits=8, group=group)
    whole = (zeros.to(torch.int16) + 128).to(torch.uint8)
    return _of_codes(one, values, scales, bits=8, group=group, least=whole, zero=-128)


def _mxfp4(one: StoredRange) -> DeviceRange:
    """Pack codes of E2M1 as bytes: twice their values, under halves of the powers of two."""
    codes = _looked_up(stream_codes(one.parts["codes"], 4), _TWICE_E2M1)
    scales = _half_powers(one.parts["scales"].view(torch.uint8))
    return _of_codes(one, codes, scales, bits=8, group=32)


def _nvfp4(one: StoredRange) -> DeviceRange:
    codes = _looked_up(stream_codes(one.parts["codes"], 4), _TWICE_E2M1)
    scales = one.parts[SCALE_VALUES][one.parts["scales"].to(torch.int64)] / 2
    return _of_codes(one, codes, scales, bits=8, group=one.group)


def _looked_up(codes: torch.Tensor, table: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int8, device=codes.device)[codes.to(torch.int32)]


def _half_powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return halves of powers of two, of which the exponents are bytes (E8M0), in bfloat16."""
    whole = exponents.to(torch.int32) - E8M0_BIAS - 1
    return torch.ldexp(torch.ones_like(whole, dtype=torch.float32), whole).to(torch.bfloat16)


def _blocks(one: StoredRange, num_bytes: int) -> torch.Tensor:
    """Return the blocks of ggml's type, uint8 [outputs, blocks, bytes]."""
    return one.parts["stored"].contiguous().view(one.outputs, -1, num_bytes)


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the float16 number of each block at a byte, [outputs, blocks]."""
    return blocks[:, :, first : first + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Return the codes of bytes in runs of ``run``: the lower halves of a run, then the upper ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), -2).flatten(-3)


def _planes(packed: torch.Tensor, run: int, bits: int, count: int) -> torch.Tensor:
    """Return ``count`` codes of ``bits`` from each byte, in runs of ``run``: the lowest of a run first."""
    shifts = torch.arange(0, bits * count, bits, dtype=torch.uint8, device=packed.device)
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    found = (runs >> shifts.view(-1, 1)) & ((1 << bits) - 1)
    return found.flatten(-3)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the fifth bits of 32 codes, packed in 4 bytes, as 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _q4(one: StoredRange, num_bytes: int) -> DeviceRange:
    """Pack blocks of Q4_0, or of Q4_1 with a least number beside the scale."""
    blocks = _blocks(one, num_bytes)
    codes = _nibbles(blocks[:, :, num_bytes - 16 :], 16).flatten(1)
    if num_bytes == 18:
        return _of_codes(one, codes, _halves(blocks, 0), bits=4, group=32, zero=8)
    return _of_codes(one, codes, _halves(blocks, 0), bits=4, group=32, least=_halves(blocks, 2))


def _q5(one: StoredRange, num_bytes: int) -> DeviceRange:
    """Pack blocks of Q5_0, or of Q5_1 with a least number beside the scale. A code takes a byte here."""
    blocks = _blocks(one, num_bytes)
    high = blocks[:, :, num_bytes - 20 : num_bytes - 16]
    codes = (_nibbles(blocks[:, :, num_bytes - 16 :], 16) | _fifth_bits(high)).flatten(1)
    if num_bytes == 22:
        return _of_codes(one, codes, _halves(blocks, 0), bits=8, group=32, zero=16)
    return _of_codes(one, codes, _halves(blocks, 0), bits=8, group=32, least=_halves(blocks, 2))


def _q8_0(one: StoredRange) -> DeviceRange:
    blocks = _blocks(one, 34)
    codes = blocks[:, :, 2:].contiguous().view(torch.int8).view(one.outputs, one.inputs)
    return _of_codes(one, codes, _halves(blocks, 0), bits=8, group=32)


def _q2_k(one: StoredRange) -> DeviceRange:
    """Pack super-blocks of 256: 16 pairs of 4-bit scales and least numbers under two float16 factors."""
    blocks = _blocks(one, 84)
    pairs, codes = blocks[:, :, :16], _planes(blocks[:, :, 16:80], 32, 2, 4).flatten(1)
    return _of_codes(
        *(one, codes, (pairs & 15).flatten(1)), bits=8, group=16, least=(pairs >> 4).flatten(1),
        outers=_halves(blocks, 80), outer_least=-_halves(blocks, 82),
    )  # fmt: skip


def _q3_k(one: StoredRange) -> DeviceRange:
    """Pack super-blocks of 256: 16 scales of 6 bits under a float16 factor. A code takes a byte here."""
    blocks = _blocks(one, 110)
    lower, upper = _nibbles(blocks[:, :, 96:104], 8), _planes(blocks[:, :, 104:108], 4, 2, 4)
    scales = (lower | upper << 4).to(torch.int8) - 32
    low, high = _planes(blocks[:, :, 32:96], 32, 2, 4), _planes(blocks[:, :, :32], 32, 1, 8)
    codes = (low | high << 2).to(torch.int8) - 4
    return _of_codes(one, codes.flatten(1), scales.flatten(1), bits=8, group=16, outers=_halves(blocks, 108))


def _q45_k(one: StoredRange, num_bytes: int) -> DeviceRange:
    """Pack super-blocks of 256: eight pairs of 6-bit scales and least numbers under two float16 factors.

    A code of Q5_K takes a byte here.
    """
    blocks = _blocks(one, num_bytes)
    low, middle, high = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    least = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    codes, bits = _nibbles(blocks[:, :, num_bytes - 128 :], 32), 4
    if num_bytes == 176:
        codes, bits = codes | _planes(blocks[:, :, 16:48], 32, 1, 8) << 4, 8
    return _of_codes(
        *(one, codes.flatten(1), scales.flatten(1)), bits=bits, group=32, least=least.flatten(1),
        outers=_halves(blocks, 0), outer_least=-_halves(blocks, 2),
    )  # fmt: skip


def _q6_k(one: StoredRange) -> DeviceRange:
    """Pack super-blocks of 256: 16 scales of 8 bits under a float16 factor. A code takes a byte here."""
    blocks = _blocks(one, 210)
    lower, upper = _nibbles(blocks[:, :, :128], 64), _planes(blocks[:, :, 128:192], 32, 2, 4)
    codes = (lower | upper << 4).flatten(1)
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    whole = (codes.to(torch.int16) - 32).to(torch.int8)
    return _of_codes(one, whole, scales, bits=8, group=16, outers=_halves(blocks, 208))


def _iq4_nl(one: StoredRange) -> DeviceRange:
    blocks = _blocks(one, 18)
    codes = _looked_up(_nibbles(blocks[:, :, 2:], 16).flatten(1), _IQ4)
    return _of_codes(one, codes, _halves(blocks, 0), bits=8, group=32)


def _iq4_xs(one: StoredRange) -> DeviceRange:
    """Pack super-blocks of 256: eight scales of 6 bits under a float16 factor. A code takes a byte here."""
    blocks = _blocks(one, 136)
    lower, upper = _planes(blocks[:, :, 4:8], 1, 4, 2), _planes(blocks[:, :, 2:4], 1, 2, 4)
    scales = ((lower | upper << 4).to(torch.int8) - 32).flatten(1)
    codes = _looked_up(_nibbles(blocks[:, :, 8:], 16).flatten(1), _IQ4)
    return _of_codes(one, codes, scales, bits=8, group=32, outers=_halves(blocks, 0))


def _gguf_mxfp4(one: StoredRange) -> DeviceRange:
    blocks = _blocks(one, 17)
    codes = _looked_up(_nibbles(blocks[:, :, 1:], 16).flatten(1), _TWICE_E2M1)
    return _of_codes(one, codes, _half_powers(blocks[:, :, 0]), bits=8, group=32)


ROWS: dict[str, _Pack] = {
    **{f"centred{bits}": partial(_centred, bits=bits) for bits in (2, 4, 8)},
    **{f"affine{bits}": partial(_affine, bits=bits) for bits in (2, 3, 4, 5, 6, 8)},
    **dict.fromkeys(("I8", "F8_E4M3"), _numbers),
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    f"{GGUF}Q4_0": partial(_q4, num_bytes=18),
    f"{GGUF}Q4_1": partial(_q4, num_bytes=20),
    f"{GGUF}Q5_0": partial(_q5, num_bytes=22),
    f"{GGUF}Q5_1": partial(_q5, num_bytes=24),
    f"{GGUF}Q8_0": _q8_0,
    f"{GGUF}Q2_K": _q2_k,
    f"{GGUF}Q3_K": _q3_k,
    f"{GGUF}Q4_K": partial(_q45_k, num_bytes=144),
    f"{GGUF}Q5_K": partial(_q45_k, num_bytes=176),
    f"{GGUF}Q6_K": _q6_k,
    f"{GGUF}IQ4_NL": _iq4_nl,
    f"{GGUF}IQ4_XS": _iq4_xs,
    f"{GGUF}MXFP4": _gguf_mxfp4,
}
