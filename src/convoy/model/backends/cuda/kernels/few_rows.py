"""Multiply a few rows by codes, which are unpacked to bfloat16 in registers, tile by tile.

Weights are the left operand of the matrix product: the tensor cores take that one from registers. Each value
is computed in float32 and rounded to bfloat16 once. A whole code times a bfloat16 scale is computed in
bfloat16, which gives the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from convoy.model.backends.cuda.kernels.forms import DeviceMatrix, DeviceRange
from convoy.model.backends.cuda.kernels.language import kernel, next_power

# The least number of rows of a matrix product in Triton.
_LEAST_ROWS = 16
# Steps of 64 inputs would be faster, but 3 of 85 products had wrong numbers (one H200, Triton 3.6).
_LEAST_INPUTS = 128
# Of a card's shared memory, for scales and alignment.
_SPARE_BYTES = 16 << 10
# The interpreter has no limit.
_INTERPRETED_BYTES = 1 << 30
# Rows. Above it, unpacking to bfloat16 once and the library's product take less time.
MAX_FEW = 256
# Outputs that occupy the card without splits, with few rows and with more.
_MANY_OUTPUTS, _SOME_OUTPUTS = 16384, 6144
# Inputs that one program unpacks.
_UNPACKED = 2048


@dataclass(frozen=True)
class FewTile:
    """Describe a tile of outputs, rows and inputs.

    ``splits`` programs share an output's inputs. ``num_stages`` tiles are loaded ahead.
    """

    outputs: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 2
    rows: int = 64
    inputs: int = 256

    def fitted(self, bits: int, room: int) -> FewTile:
        """Return this tile, made smaller until its loads fit into ``room`` bytes of shared memory."""
        tile = self
        while tile.num_stages * tile.inputs * (2 * tile.rows + tile.outputs * bits // 8) > room:
            if tile.inputs > _LEAST_INPUTS:
                tile = replace(tile, inputs=tile.inputs // 2)
            elif tile.rows > _LEAST_ROWS:
                tile = replace(tile, rows=tile.rows // 2)
            elif tile.num_stages > 1:
                tile = replace(tile, num_stages=tile.num_stages - 1)
            else:
                # The least tile there is: the driver refuses it where it does not fit.
                break
        return tile


# The candidates that `comparisons.cuda.forms` measures and reports.
FEW_TILES = (
    FewTile(64),
    FewTile(64, 4),
    FewTile(64, 2, num_stages=4, inputs=128),
    FewTile(128, 1, 8, 3),
    FewTile(128, 4, 8),
    FewTile(128, 2, 8, 3, rows=128, inputs=128),
)


def few_tile(rows: int, outputs: int, bits: int) -> FewTile | None:
    """Return the tile that takes the least time, or None where unpacking does (one H200)."""
    if rows > MAX_FEW:
        return None
    if rows > FewTile.rows:
        if bits == 4:
            return FewTile(128, 1 if outputs >= _SOME_OUTPUTS else 2, 8, 3, rows=128, inputs=128)
        if outputs >= _SOME_OUTPUTS:
            return FewTile(128, 1, 8, rows=256, inputs=128)
        if rows > 2 * FewTile.rows:
            return None
    if outputs < _MANY_OUTPUTS:
        return FewTile(64, 4)
    return FewTile(64, 1, 4, 3) if rows <= FewTile.rows // 2 else FewTile(128, 1, 8, 3)


def takes_few(weight: DeviceMatrix, rows: int) -> bool:
    """Return whether `few_rows` multiplies so many rows in less time than unpacking takes."""
    return all(few_tile(rows, one.shape[0], one.bits) is not None for one in weight.ranges)


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
    tile = tile or few_tile(rows, outputs, one.bits) or FewTile(64)
    block = next_power(min(rows, tile.rows), _LEAST_ROWS)
    tile = replace(tile, rows=block).fitted(one.bits, shared_room(x))
    step = min(tile.inputs, 128) if one.bits == 8 else tile.inputs
    # Splits must be whole numbers of tiles, because a program has no mask at the end of its share.
    splits = tile.splits if inputs % (tile.splits * step) == 0 else 1
    parts = out if splits == 1 else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    few_codes_kernel[-(-outputs // tile.outputs), -(-rows // tile.rows), splits](
        *(parts, x, one.words, *one.arguments, out if bias is None else bias, rows, x.stride(0)),
        *(parts.stride(-2), rows * outputs), INPUTS=inputs, OUTPUTS=outputs, BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs, BLOCK_K=step, SUB=math.gcd(one.group, step), SPLITS=splits,
        BIASED=bias is not None, FAST=_is_fast(one, x), PACKED=_packs(x), STAGES=tile.num_stages,
        num_warps=tile.num_warps, **one.constants,
    )  # fmt: skip
    if splits > 1:
        size = rows * outputs
        sum_kernel[-(-size // 1024),](
            out, parts, size, out.stride(0), OUTPUTS=outputs, SPLITS=splits, BLOCK=1024
        )


def shared_room(x: torch.Tensor) -> int:
    """Return the bytes of shared memory for the loads of one program."""
    if not x.is_cuda:
        return _INTERPRETED_BYTES
    # Its stubs lack this number.
    properties: Any = torch.cuda.get_device_properties(x.device)
    return int(properties.shared_memory_per_block_optin) - _SPARE_BYTES


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
    steps: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K // SPLITS
    whole: tl.constexpr = INPUTS % BLOCK_K == 0
    first = tl.program_id(2) * steps
    width: tl.constexpr = INPUTS // 4 if BITS == 4 else INPUTS
    per_step: tl.constexpr = BLOCK_K // 4 if BITS == 4 else BLOCK_K
    word, lane, sub = tl.arange(0, per_step), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // SUB)
    # Rows and outputs beyond the last repeat it, and are not stored.
    some, own = tl.minimum(row, rows - 1), tl.minimum(output, OUTPUTS - 1)
    codes_at = codes + own.to(tl.int64)[:, None] * width
    rows_at = x + some.to(tl.int64)[None, :] * stride
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = (first + step) * BLOCK_K
        at = (first + step) * per_step + word
        # Written so, the compiler sees that groups follow each other, and loads them ahead.
        group = start // SUB + sub if SUB == GROUP else (start + sub * SUB) // GROUP
        if whole:
            packed = tl.load(codes_at + at[None, :])
            numbers = tl.load(rows_at + (start + lane)[:, None])
            both = (own >= 0)[:, None]
        else:
            packed = tl.load(codes_at + at[None, :], mask=(at < width)[None, :], other=0)
            numbers = tl.load(rows_at + (start + lane)[:, None], mask=(start + lane < INPUTS)[:, None],
                              other=0.0)
            both = (start + sub * SUB < INPUTS)[None, :]
        scale, added, zero = _numbers(scales, least, outers, outer_least, own, group, both, INPUTS, GROUP,
                                      ZERO, LEAST, OUTER)
        value = _valued(_read(packed, BLOCK_N, BLOCK_K, BITS, FLOATS, PACKED), scale, added, zero, BLOCK_N,
                        BLOCK_K, SUB, 128 if BITS == 4 else 0, ZERO, LEAST, FAST)
        total = tl.dot(value.to(numbers.dtype), numbers, total)
    real, present = output < OUTPUTS, row < rows
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
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 4;
            lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 8;
            lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 12;
            lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
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
def _read(packed: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr,
          FLOATS: tl.constexpr, PACKED: tl.constexpr) -> tl.tensor:
    """Return codes in the order of the inputs, [BLOCK_N, BLOCK_K]; of 4 bits, 128 too large.

    A thread of the tensor cores holds two neighbours of each run of eight inputs, which are the codes of two
    neighbouring words. So this order moves no number between threads.
    """
    if BITS == 4:
        one, two, three, four = _planes(packed, PACKED)
        planes = tl.join(tl.join(one, two), tl.join(three, four))
        planes = tl.reshape(planes, [BLOCK_N, BLOCK_K // 32, 8, 2, 2])
        found = tl.reshape(tl.permute(planes, (0, 1, 4, 3, 2)), [BLOCK_N, BLOCK_K])
    else:
        found = _number(packed, FLOATS)
    return found


@kernel
def _valued(numbers: tl.tensor, scale: tl.tensor, added: tl.tensor, zero: tl.tensor, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr, SUB: tl.constexpr, EXCESS: tl.constexpr, ZERO: tl.constexpr,
            LEAST: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the values of codes that are ``EXCESS`` too large."""
    sums: tl.constexpr = tl.bfloat16 if FAST else tl.float32
    subs: tl.constexpr = BLOCK_K // SUB
    if LEAST == 2:
        value = numbers.to(sums) - _spread((zero + EXCESS).to(sums), BLOCK_N, subs, SUB)
    else:
        value = numbers.to(sums) - (ZERO + EXCESS + 0.0)
    value *= _spread(scale.to(sums), BLOCK_N, subs, SUB)
    if LEAST == 1:
        value += _spread(added.to(sums), BLOCK_N, subs, SUB)
    return value


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
