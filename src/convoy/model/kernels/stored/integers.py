"""Define the products of `--compute int8`: rows rounded to 8 bits times stored codes, by torch's operators.

docs/exact.md has the order of sums. Compiled code is compared with this, bit by bit, and where nothing is
compiled this is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convoy.model.kernels.stored.bits import IQ4_NL, TWICE_E2M1, stream_codes
from convoy.model.kernels.stored.matrix import GGUF, StoredRange

# Inputs of a row that share a scale.
ROUNDED_GROUP = 32
_GREATEST = 127.0
# The values of codes.
_VALUES_E2M1, _VALUES_IQ4_NL = torch.tensor(TWICE_E2M1), torch.tensor(IQ4_NL)
# Below it, all numbers of a group are 0: 127 over it is finite.
_LEAST_TOP = 2.0**-100


@dataclass(frozen=True)
class IntegerRange:
    """Hold outputs as whole numbers: a weight is factor * code + shift.

    ``codes`` are whole numbers in float32 [outputs, inputs]. ``factors`` [outputs, steps] has one for each 16
    or 32 inputs, and ``shifts`` [outputs, groups] for each 32, or is None for none.
    """

    codes: torch.Tensor
    factors: torch.Tensor
    shifts: torch.Tensor | None = None


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 [rows, inputs] to whole numbers from -127 to 127, in float32.

    Also returns the scale of each group [rows, groups]. A group that is not finite has numbers 0 and the
    scale NaN.
    """
    groups = x.reshape(len(x), -1, ROUNDED_GROUP)
    greatest = groups.abs().amax(-1)
    is_finite = greatest.isfinite()
    # A number over a tensor would be its reciprocal times the number, which rounds twice.
    wide = torch.div(torch.full_like(greatest, _GREATEST), greatest)
    factor = torch.where(is_finite & (greatest >= _LEAST_TOP), wide, 0.0)
    codes = (groups * factor.unsqueeze(-1)).round_().where(is_finite.unsqueeze(-1), 0.0)
    return codes.flatten(-2), torch.where(is_finite, greatest / _GREATEST, torch.nan)


def int8_product(x: torch.Tensor, of: IntegerRange, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b for float32 [rows, inputs], with rounded rows: the definition."""
    codes, scales = round_rows(x)
    weighted = scales * codes.view(len(x), -1, ROUNDED_GROUP).sum(-1)
    num_steps = of.factors.shape[1]
    steps, weights = (whole.view(len(whole), num_steps, -1) for whole in (codes, of.codes))
    in_group = num_steps // scales.shape[1]
    total = x.new_zeros(len(x), len(of.codes))
    for step in range(num_steps):
        group = step // in_group
        # Whole numbers below 2^24 in all partial sums: exact in any order.
        products = steps[:, step] @ weights[:, step].mT
        total = fused(scales[:, group, None] * of.factors[:, step], products, total)
        if of.shifts is not None:
            total = fused(weighted[:, group, None], of.shifts[:, group], total)
    return total if bias is None else total + bias


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c of float32, rounded once, as a fused multiply-add does.

    The product is exact in float64. The sum is rounded to an odd last bit there if it is not exact, so that
    the second rounding gives the nearest float32 (Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums", 2008).
    """
    product = a.double() * b.double()
    other = c.double().expand_as(product)
    whole = product + other
    back = whole - product
    # Knuth's two-sum: what the addition rounded away.
    lost = (product - (whole - back)) + (other - back)
    is_even = (whole.view(torch.int64) & 1) == 0
    towards = torch.copysign(torch.full_like(lost, torch.inf), lost)
    is_inexact = (lost != 0) & lost.isfinite()
    return torch.where(is_inexact & is_even, torch.nextafter(whole, towards), whole).float()


def integers_of(one: StoredRange) -> IntegerRange:
    """Return a range as whole numbers, for the forms that `stored.int8.rounds_inputs` names."""
    if one.form.startswith(GGUF):
        return _GGUF[one.form.removeprefix(GGUF)](one)
    if one.form == "MXFP4":
        codes = _VALUES_E2M1[stream_codes(one.parts["codes"], 4)[:, : one.inputs].long()]
        return IntegerRange(codes, _half_power(one.parts["scales"].view(torch.uint8)))
    if one.form == "I8":
        codes = one.parts["values"].to(torch.float32)
    else:
        codes = stream_codes(one.parts["codes"], int(one.form[-1]))[:, : one.inputs].to(torch.float32)
    factors, shifts = _of_groups(one, one.parts["scales"]), None
    if one.form.startswith("affine"):
        shifts = _of_groups(one, one.parts["biases"])
    elif "zeros" in one.parts:
        shifts = 0 - _of_groups(one, one.parts["zeros"]) * factors
    elif one.form.startswith("centred"):
        codes -= float(1 << (int(one.form[-1]) - 1))
    return IntegerRange(codes, factors, shifts)


def _of_groups(one: StoredRange, part: torch.Tensor) -> torch.Tensor:
    """Return a number for each 32 inputs, float32 [outputs, groups]."""
    count = one.inputs // ROUNDED_GROUP
    wide = one.inputs if part.shape[1] == 1 else one.group
    return part.to(torch.float32).repeat_interleave(wide // ROUNDED_GROUP, 1)[:, :count]


def _blocks(one: StoredRange, size: int) -> torch.Tensor:
    """Return the blocks of a range of ggml, uint8 [outputs, blocks, size]."""
    return one.parts["stored"].contiguous().view(one.outputs, -1, size)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the half at a byte of each block, float32 [outputs, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).to(torch.float32).squeeze(-1)


def _two_runs(packed: torch.Tensor) -> torch.Tensor:
    """Return codes of 4 bits: the low ones of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1).to(torch.float32)


def _q4_0(one: StoredRange) -> IntegerRange:
    blocks = _blocks(one, 18)
    return IntegerRange((_two_runs(blocks[..., 2:]) - 8).flatten(1), _half(blocks, 0))


def _q4_1(one: StoredRange) -> IntegerRange:
    blocks = _blocks(one, 20)
    return IntegerRange(_two_runs(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2))


def _five_bits(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return codes of 5 bits [outputs, blocks, 32]: the low four, and 32 highest bits in four bytes."""
    fifths = high.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return _two_runs(low) + 16.0 * fifths.flatten(-2)


def _q5_0(one: StoredRange) -> IntegerRange:
    blocks = _blocks(one, 22)
    return IntegerRange((_five_bits(blocks[..., 6:], blocks[..., 2:6]) - 16).flatten(1), _half(blocks, 0))


def _q5_1(one: StoredRange) -> IntegerRange:
    blocks = _blocks(one, 24)
    codes = _five_bits(blocks[..., 8:], blocks[..., 4:8])
    return IntegerRange(codes.flatten(1), _half(blocks, 0), _half(blocks, 2))


def _iq4_nl(one: StoredRange) -> IntegerRange:
    blocks = _blocks(one, 18)
    return IntegerRange(_VALUES_IQ4_NL[_two_runs(blocks[..., 2:]).long()].flatten(1), _half(blocks, 0))


def _mxfp4(one: StoredRange) -> IntegerRange:
    blocks = _blocks(one, 17)
    codes = _VALUES_E2M1[_two_runs(blocks[..., 1:]).long()]
    return IntegerRange(codes.flatten(1), _half_power(blocks[..., 0]))


def _half_power(exponents: torch.Tensor) -> torch.Tensor:
    """Return half of each power of two of an exponent byte, E8M0, in float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 128)


def _q8_0(one: StoredRange) -> IntegerRange:
    blocks = _blocks(one, 34)
    codes = blocks[..., 2:].contiguous().view(torch.int8).to(torch.float32)
    return IntegerRange(codes.flatten(1), _half(blocks, 0))


def _q4_k(one: StoredRange) -> IntegerRange:
    """Return 32 inputs at a time, with scales and minima of 6 bits under two halves."""
    blocks = _blocks(one, 144)
    codes = _two_runs(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return _of_super_blocks(blocks, codes)


def _q5_k(one: StoredRange) -> IntegerRange:
    """Return the same with codes of 5 bits: a byte has the highest ones of eight inputs, 32 apart."""
    blocks = _blocks(one, 176)
    codes = _two_runs(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    fifths = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _of_super_blocks(blocks, codes + 16.0 * fifths.reshape(codes.shape))


def _of_super_blocks(blocks: torch.Tensor, codes: torch.Tensor) -> IntegerRange:
    """Return codes [outputs, blocks, 4, 64] with the scales and minima of their blocks."""
    packed = blocks[..., 4:16].to(torch.int32)
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1)
    least = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), -1)
    factors = _half(blocks, 0).unsqueeze(-1) * scales
    shifts = 0 - _half(blocks, 2).unsqueeze(-1) * least
    return IntegerRange(codes.flatten(1), factors.flatten(1), shifts.flatten(1))


def _q6_k(one: StoredRange) -> IntegerRange:
    """Return 16 inputs at a time, with scales of 8 bits under a half."""
    blocks = _blocks(one, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), -2).flatten(-2)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-2)
    codes = (low | high << 4).to(torch.float32) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return IntegerRange(codes.flatten(1), (_half(blocks, 208).unsqueeze(-1) * scales).flatten(1))


_GGUF = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
