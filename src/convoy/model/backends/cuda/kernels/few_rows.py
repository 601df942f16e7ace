"""Multiply a few rows by codes, which are unpacked to bfloat16 in registers, tile by tile.

Weights are the left operand of the matrix product: the tensor cores take that one from registers. Each value
is computed in float32 and rounded to bfloat16 once. A whole code times a bfloat16 scale is computed in
bfloat16, which gives the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch.nn.functional import pad

from convoy.model.backends.cuda.kernels.forms import RUN, UNIT, DeviceMatrix, DeviceRange
from convoy.model.backends.cuda.kernels.language import kernel, next_power

# The least number of rows of a matrix product in Triton.
_LEAST_ROWS = 16
# Inputs of a tile: 64 words of 4-bit codes, or bytes.
_TILE_INPUTS = {4: 256, 8: 128}
# Inputs that one program unpacks.
_UNPACKED = 2048


@dataclass(frozen=True)
class FewTile:
    """Describe a tile: outputs, programs that share an output's inputs, warps and pipeline stages."""

    outputs: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


# The candidates that `comparisons.cuda.forms` measures and reports.
FEW_TILES = (
    FewTile(32, 1, 2),
    FewTile(64),
    FewTile(64, 2),
    FewTile(64, 4),
    FewTile(128, 1, 8),
    FewTile(128, 4, 8),
)
# By the number of outputs: fewer outputs need more splits to occupy the card.
_BY_OUTPUTS = ((16384, FewTile(64)), (6144, FewTile(64, 2)), (0, FewTile(64, 4)))


def few_rows(
    x: torch.Tensor, weight: DeviceMatrix, bias: torch.Tensor | None, tile: FewTile | None = None
) -> torch.Tensor:
    """Return ``x`` [rows, inputs] times ``weight`` [outputs, inputs], in the dtype of ``x``."""
    rows, outputs = x.shape[0], weight.shape[0]
    out = x.new_empty(rows, outputs)
    first = 0
    for one in weight.ranges:
        last = first + one.shape[0]
        _few(x, one, None if bias is None else bias[first:last], out[:, first:last], tile)
        first = last
    return out


def _few(
    x: torch.Tensor, one: DeviceRange, bias: torch.Tensor | None, out: torch.Tensor, tile: FewTile | None
) -> None:
    (outputs, inputs), rows = one.shape, x.shape[0]
    tile = tile or next(tile for least, tile in _BY_OUTPUTS if outputs >= least)
    step = _TILE_INPUTS[one.bits]
    # Splits must be whole numbers of tiles, because a program has no mask at the end of its share.
    splits = tile.splits if inputs % (tile.splits * step) == 0 else 1
    block = next_power(min(rows, 64), _LEAST_ROWS)
    x = _by_planes(x, step) if one.bits == 4 else x
    parts = out if splits == 1 else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    few_codes_kernel[-(-outputs // tile.outputs), -(-rows // block), splits](
        *(parts, x, one.words, *one.arguments, out if bias is None else bias, rows, x.stride(0)),
        *(parts.stride(-2), rows * outputs), INPUTS=inputs, OUTPUTS=outputs, BLOCK_M=block,
        BLOCK_N=tile.outputs, BLOCK_K=step, SUB=math.gcd(one.group, step), SPLITS=splits,
        BIASED=bias is not None, FAST=_is_fast(one, x), PACKED=_packs(x), STAGES=tile.num_stages,
        num_warps=tile.num_warps, **one.constants,
    )  # fmt: skip
    if splits > 1:
        size = rows * outputs
        sum_kernel[-(-size // 1024),](
            out, parts, size, out.stride(0), OUTPUTS=outputs, SPLITS=splits, BLOCK=1024
        )


def _by_planes(x: torch.Tensor, step: int) -> torch.Tensor:
    """Return ``x`` with the inputs of each tile in the order in which the words' codes are multiplied.

    All first codes of the tile's words come first, then all second ones. In the order of ``x`` itself, a tile
    would be read in runs of eight inputs, and 64 rows take twice as long (one H200).
    """
    rows, inputs = x.shape
    x = pad(x, (0, -inputs % step)) if inputs % step else x
    return x.view(rows, -1, step // UNIT, 4, RUN).transpose(2, 3).reshape(rows, -1)


def unpack(weight: DeviceMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [outputs, inputs], each rounded once to ``dtype``."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.ranges[0].codes.device)
    first = 0
    for one in weight.ranges:
        outputs, inputs = one.shape
        unpack_kernel[outputs, -(-inputs // _UNPACKED)](
            *(out[first : first + outputs], one.words, *one.arguments), INPUTS=inputs,
            BLOCK=min(_UNPACKED, next_power(inputs)), **one.constants,
        )  # fmt: skip
        first += outputs
    return out


def _is_fast(one: DeviceRange, x: torch.Tensor) -> bool:
    exact = one.scales.dtype == torch.bfloat16 and one.least is None and one.outers is None
    return exact and x.dtype == torch.bfloat16 and one.codes.dtype != torch.float8_e4m3fn


def _packs(x: torch.Tensor) -> bool:
    """Return whether pairs of codes are unpacked by assembly, which Triton's interpreter does not know."""
    return x.is_cuda and x.dtype == torch.bfloat16


# fmt: off


@kernel
def few_codes_kernel(out: tl.tensor, x: tl.tensor, codes: tl.tensor, scales: tl.tensor, least: tl.tensor,
                     outers: tl.tensor, outer_least: tl.tensor, bias: tl.tensor, rows: tl.tensor,
                     stride: tl.tensor, out_stride: tl.tensor, out_size: tl.tensor, INPUTS: tl.constexpr,
                     OUTPUTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
                     LEAST: tl.constexpr, OUTER: tl.constexpr, FLOATS: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr, SPLITS: tl.constexpr,
                     BIASED: tl.constexpr, FAST: tl.constexpr, PACKED: tl.constexpr,
                     STAGES: tl.constexpr) -> None:
    """Multiply by codes. Grid (OUTPUTS / BLOCK_N, rows / BLOCK_M, SPLITS)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real, present = output < OUTPUTS, row < rows
    steps: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K // SPLITS
    first = tl.program_id(2) * steps
    word = tl.arange(0, BLOCK_K // 4 if BITS == 4 else BLOCK_K)
    width: tl.constexpr = INPUTS // 4 if BITS == 4 else INPUTS
    per_step: tl.constexpr = BLOCK_K // 4 if BITS == 4 else BLOCK_K
    codes_at = codes + output.to(tl.int64)[:, None] * width
    some_at = x + row.to(tl.int64)[None, :] * stride
    sub = tl.arange(0, BLOCK_K // SUB)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = (first + step) * BLOCK_K
        at = (first + step) * per_step + word
        packed = tl.load(codes_at + at[None, :], mask=real[:, None] & (at < width)[None, :], other=0)
        group = (start + sub * SUB) // GROUP
        both = real[:, None] & (start + sub * SUB < INPUTS)[None, :]
        scale, added, zero = _numbers(scales, least, outers, outer_least, output, group, both, INPUTS, GROUP,
                                      ZERO, LEAST, OUTER)
        if BITS == 4:
            one, two, three, four = _planes(packed, PACKED)
            total = _times(total, one, some_at, start + word, present, scale, added, zero, INPUTS, BLOCK_N,
                           BLOCK_K, SUB, 4, 128, ZERO, LEAST, FAST)
            total = _times(total, two, some_at, start + word + 64, present, scale, added, zero, INPUTS,
                           BLOCK_N, BLOCK_K, SUB, 4, 128, ZERO, LEAST, FAST)
            total = _times(total, three, some_at, start + word + 128, present, scale, added, zero, INPUTS,
                           BLOCK_N, BLOCK_K, SUB, 4, 128, ZERO, LEAST, FAST)
            total = _times(total, four, some_at, start + word + 192, present, scale, added, zero, INPUTS,
                           BLOCK_N, BLOCK_K, SUB, 4, 128, ZERO, LEAST, FAST)
        else:
            total = _times(total, _number(packed, FLOATS), some_at, start + word, present, scale, added, zero,
                           INPUTS, BLOCK_N, BLOCK_K, SUB, 1, 0, ZERO, LEAST, FAST)
    split = tl.program_id(2)
    if BIASED:
        more = tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
        total += tl.where(split == 0, more, 0.0)[:, None]
    to = split.to(tl.int64) * out_size + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=present[None, :] & real[:, None])


@kernel
def _planes(packed: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    """Return the four codes of int16 words as bfloat16 numbers that are 128 too large."""
    if PACKED:
        one, two, three, four = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            and.b32 t, $4, 0x000f000f;
            or.b32 $0, t, 0x43004300;
            shr.b32 t, $4, 4;
            and.b32 t, t, 0x000f000f;
            or.b32 $1, t, 0x43004300;
            shr.b32 t, $4, 8;
            and.b32 t, t, 0x000f000f;
            or.b32 $2, t, 0x43004300;
            shr.b32 t, $4, 12;
            and.b32 t, t, 0x000f000f;
            or.b32 $3, t, 0x43004300;
            }
            """, "=r,=r,=r,=r,r", [packed],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        one, two = _plane(packed, 0), _plane(packed, 4)
        three, four = _plane(packed, 8), _plane(packed, 12)
    return one, two, three, four


@kernel
def _plane(packed: tl.tensor, shift: tl.constexpr) -> tl.tensor:
    return ((packed >> shift) & 15).to(tl.float32) + 128.0


@kernel
def _number(stored: tl.tensor, FLOATS: tl.constexpr) -> tl.tensor:
    """Return int8 numbers as they are, and those of float8 (E4M3) as float32."""
    if FLOATS:
        bits = (stored.to(tl.int32) & 127) << 20 | (stored.to(tl.int32) & 128) << 24
        # The exponent's bias is 7, and that of float32 127.
        found = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        found = stored
    return found


@kernel
def _numbers(scales: tl.tensor, least: tl.tensor, outers: tl.tensor, outer_least: tl.tensor,
             output: tl.tensor, group: tl.tensor, both: tl.tensor, INPUTS: tl.constexpr, GROUP: tl.constexpr,
             ZERO: tl.constexpr, LEAST: tl.constexpr, OUTER: tl.constexpr) -> tl.tensor:
    """Return scale, least number and zero of groups, [outputs, groups]; scales may stay bfloat16."""
    groups: tl.constexpr = INPUTS // GROUP
    at = output.to(tl.int64)[:, None] * groups + group[None, :]
    scale = tl.load(scales + at, mask=both, other=0)
    added, zero = scale, scale
    if OUTER:
        outer = output.to(tl.int64)[:, None] * (groups // OUTER) + (group // OUTER)[None, :]
        scale = scale.to(tl.float32) * tl.load(outers + outer, mask=both, other=0.0).to(tl.float32)
    if LEAST == 1:
        added = tl.load(least + at, mask=both, other=0).to(tl.float32)
        if OUTER:
            added *= tl.load(outer_least + outer, mask=both, other=0.0).to(tl.float32)
    if LEAST == 2:
        zero = tl.load(least + at, mask=both, other=0).to(tl.float32) + (ZERO + 0.0)
    return scale, added, zero


@kernel
def _times(total: tl.tensor, numbers: tl.tensor, some_at: tl.tensor, lane: tl.tensor, present: tl.tensor,
           scale: tl.tensor, added: tl.tensor, zero: tl.tensor, INPUTS: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_K: tl.constexpr, SUB: tl.constexpr, PLANES: tl.constexpr, EXCESS: tl.constexpr,
           ZERO: tl.constexpr, LEAST: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Add the product of one plane of codes, [BLOCK_N, BLOCK_K / PLANES], to the sums."""
    # With four planes, ``x`` has zeros up to a whole tile.
    known = lane < INPUTS if PLANES == 1 else lane >= 0
    some = tl.load(some_at + lane[:, None], mask=known[:, None] & present[None, :], other=0.0)
    dtype: tl.constexpr = some.dtype
    sums: tl.constexpr = tl.bfloat16 if FAST else tl.float32
    subs: tl.constexpr = BLOCK_K // SUB
    each: tl.constexpr = SUB // PLANES
    if LEAST == 2:
        value = numbers.to(sums) - _spread((zero + EXCESS).to(sums), BLOCK_N, subs, each)
    else:
        value = numbers.to(sums) - (ZERO + EXCESS + 0.0)
    value *= _spread(scale.to(sums), BLOCK_N, subs, each)
    if LEAST == 1:
        value += _spread(added.to(sums), BLOCK_N, subs, each)
    return tl.dot(value.to(dtype), some, total)


@kernel
def _spread(numbers: tl.tensor, BLOCK_N: tl.constexpr, SUBS: tl.constexpr, EACH: tl.constexpr) -> tl.tensor:
    """Repeat each number of [BLOCK_N, SUBS] for its inputs."""
    if SUBS == 1:
        found = tl.broadcast_to(numbers, [BLOCK_N, EACH])
    else:
        found = tl.broadcast_to(numbers[:, :, None], [BLOCK_N, SUBS, EACH])
        found = tl.reshape(found, [BLOCK_N, SUBS * EACH])
    return found


@kernel
def sum_kernel(out: tl.tensor, parts: tl.tensor, size: tl.tensor, stride: tl.tensor, OUTPUTS: tl.constexpr,
               SPLITS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Sum the splits of each number, in their order, so the result does not vary. Grid (size / BLOCK,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + part * size + at, mask=known, other=0.0)
    to = at // OUTPUTS * stride + at % OUTPUTS
    tl.store(out + to, total.to(out.dtype.element_ty), mask=known)


@kernel
def unpack_kernel(out: tl.tensor, codes: tl.tensor, scales: tl.tensor, least: tl.tensor, outers: tl.tensor,
                  outer_least: tl.tensor, INPUTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                  ZERO: tl.constexpr, LEAST: tl.constexpr, OUTER: tl.constexpr, FLOATS: tl.constexpr,
                  BLOCK: tl.constexpr) -> None:
    """Unpack codes of one output. Grid (outputs, INPUTS / BLOCK)."""
    output = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = lane < INPUTS
    if BITS == 4:
        # Each word is read four times, from the cache, so that values are stored in their order.
        word = lane // 32 * 8 + lane % 8
        packed = tl.load(codes + output.to(tl.int64) * (INPUTS // 4) + word, mask=known, other=0).to(tl.int32)
        code = (packed >> (lane // 8 % 4 * 4)) & 15
        # Conversions run at an eighth of the rate of sums.
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        packed = tl.load(codes + output.to(tl.int64) * INPUTS + lane, mask=known, other=0)
        number = _number(packed, FLOATS).to(tl.float32)
    scale, added, zero = _lone_numbers(scales, least, outers, outer_least, output, lane // GROUP, known,
                                       INPUTS, GROUP, ZERO, LEAST, OUTER)
    value = (number - zero) * scale
    if LEAST == 1:
        value += added
    tl.store(out + output.to(tl.int64) * INPUTS + lane, value.to(out.dtype.element_ty), mask=known)


@kernel
def _lone_numbers(scales: tl.tensor, least: tl.tensor, outers: tl.tensor, outer_least: tl.tensor,
                  output: tl.tensor, group: tl.tensor, known: tl.tensor, INPUTS: tl.constexpr,
                  GROUP: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr,
                  OUTER: tl.constexpr) -> tl.tensor:
    """Return scale, least number and zero of groups of one output, as float32."""
    groups: tl.constexpr = INPUTS // GROUP
    at = output.to(tl.int64) * groups + group
    scale = tl.load(scales + at, mask=known, other=0).to(tl.float32)
    added, zero = scale, tl.zeros(scale.shape, dtype=tl.float32) + ZERO
    if OUTER:
        outer = output.to(tl.int64) * (groups // OUTER) + group // OUTER
        scale *= tl.load(outers + outer, mask=known, other=0.0).to(tl.float32)
    if LEAST == 1:
        added = tl.load(least + at, mask=known, other=0).to(tl.float32)
        if OUTER:
            added *= tl.load(outer_least + outer, mask=known, other=0.0).to(tl.float32)
    if LEAST == 2:
        zero += tl.load(least + at, mask=known, other=0).to(tl.float32)
    return scale, added, zero
