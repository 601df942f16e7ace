"""Multiply a few rows by rounded weights, which are unpacked to bfloat16 in registers, tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from convoy.model.backends.cuda.kernels.language import kernel, next_power

# Half of a group of 4-bit weights, see `kernels.rounded`.
_HALF = 32
# The least number of rows of a matrix product in Triton.
_LEAST_ROWS = 16


@dataclass(frozen=True)
class FewTile:
    """Describe a tile: outputs, inputs, programs that share an output's inputs, warps and pipeline stages."""

    outputs: int
    inputs: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


# The candidates that `comparisons.cuda.single` measures and reports.
FEW_TILES = (
    FewTile(32, 128),
    FewTile(32, 256, num_stages=3),
    FewTile(64, 128),
    FewTile(64, 128, splits=4),
    FewTile(64, 256, splits=4, num_stages=3),
    FewTile(128, 128, splits=4),
)
_NARROW, _WIDE = FewTile(64, 128, splits=4), FewTile(64, 128)
_MANY_OUTPUTS = 16384
# Bytes that one program unpacks.
_UNPACKED = 1024


def few_int8(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    tile: FewTile | None = None,
) -> torch.Tensor:
    """Return ``x`` [rows, inputs] times int8 ``numbers`` [outputs, inputs], float32 ``scales`` [outputs]."""
    return _few(few_int8_kernel, x, numbers, scales, bias, tile, numbers.shape[1])


def few_int4(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    tile: FewTile | None = None,
) -> torch.Tensor:
    """Return ``x`` [rows, inputs] times 4-bit weights, packed as in `kernels.rounded`."""
    return _few(few_int4_kernel, x, numbers, scales, bias, tile, 2 * numbers.shape[1])


def _few(
    run: object,
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    tile: FewTile | None,
    inputs: int,
) -> torch.Tensor:
    rows, outputs = x.shape[0], numbers.shape[0]
    tile = tile or (_WIDE if outputs >= _MANY_OUTPUTS else _NARROW)
    # Splits must be whole numbers of tiles, because a program has no mask at the end of its share.
    splits = tile.splits if inputs % (tile.splits * tile.inputs) == 0 else 1
    block = next_power(min(rows, 64), _LEAST_ROWS)
    out = x.new_empty(rows, outputs)
    parts = out if splits == 1 else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    run[-(-outputs // tile.outputs), -(-rows // block), splits](  # type: ignore[index]
        parts, x, numbers, scales, out if bias is None else bias, rows, x.stride(0), INPUTS=inputs,
        OUTPUTS=outputs, BLOCK_M=block, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs, SPLITS=splits,
        BIASED=bias is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        size = rows * outputs
        sum_kernel[-(-size // 1024),](out, parts, size, SPLITS=splits, BLOCK=1024)
    return out


def unpack(numbers: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [outputs, inputs] that `kernels.rounded` packed, in ``dtype``."""
    outputs, width = numbers.shape
    out = torch.empty(outputs, width * 8 // bits, dtype=dtype, device=numbers.device)
    grid = outputs, -(-width // _UNPACKED)
    if bits == 8:
        unpack_int8_kernel[grid](out, numbers, scales, WIDTH=width, BLOCK=_UNPACKED)
    else:
        unpack_int4_kernel[grid](out, numbers, scales, WIDTH=width, HALF=_HALF, BLOCK=_UNPACKED)
    return out


# fmt: off


@kernel
def few_int8_kernel(out: tl.tensor, x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor,
                    rows: tl.tensor, stride: tl.tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                    SPLITS: tl.constexpr, BIASED: tl.constexpr) -> None:
    """Multiply by 8-bit weights. Grid (OUTPUTS / BLOCK_N, rows / BLOCK_M, SPLITS)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real, present = output < OUTPUTS, row < rows
    each: tl.constexpr = INPUTS // SPLITS
    first = tl.program_id(2) * each
    some_at = x + row.to(tl.int64)[:, None] * stride
    weight_at = weight + output.to(tl.int64)[None, :] * INPUTS
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, each, BLOCK_K):
        lane = first + start + tl.arange(0, BLOCK_K)
        known = lane < INPUTS
        some = tl.load(some_at + lane[None, :], mask=present[:, None] & known[None, :], other=0.0)
        numbers = tl.load(weight_at + lane[:, None], mask=known[:, None] & real[None, :], other=0)
        total = tl.dot(some, numbers.to(some.dtype), total)
    # The scale is constant over an output's inputs, so one multiplication after the sum is enough.
    total *= tl.load(scales + output, mask=real, other=0.0)[None, :]
    _store_few(out, total, bias, output, row, real, present, rows, OUTPUTS, BIASED)


@kernel
def few_int4_kernel(out: tl.tensor, x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor,
                    rows: tl.tensor, stride: tl.tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                    SPLITS: tl.constexpr, BIASED: tl.constexpr) -> None:
    """Multiply by 4-bit weights in groups of 64 inputs. Grid (OUTPUTS / BLOCK_N, rows / BLOCK_M, SPLITS)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real, present = output < OUTPUTS, row < rows
    groups: tl.constexpr = INPUTS // 64
    each: tl.constexpr = groups // SPLITS
    some_at = x + row.to(tl.int64)[:, None] * stride
    place = output.to(tl.int64)[:, None] * groups
    number = tl.arange(0, BLOCK_K // 2)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, each, BLOCK_K // 64):
        group = tl.program_id(2) * each + start + tl.arange(0, BLOCK_K // 64)
        known = group < groups
        at = place + group[None, :]
        both = real[:, None] & known[None, :]
        scale = tl.load(scales + at * 2, mask=both, other=0.0).to(x.dtype.element_ty)[:, :, None]
        least = tl.load(scales + at * 2 + 1, mask=both, other=0.0).to(x.dtype.element_ty)[:, :, None]
        packed = tl.load(weight + at[:, :, None] * 32 + tl.arange(0, 32)[None, None, :],
                         mask=both[:, :, None], other=0)
        # Cast to signed bytes first: Triton converts those to bfloat16 four at a time.
        low = (packed & 15).to(tl.int8, bitcast=True).to(x.dtype.element_ty) * scale + least
        high = (packed >> 4).to(tl.int8, bitcast=True).to(x.dtype.element_ty) * scale + least
        lane = (tl.program_id(2) * each + start + number // 32) * 64 + number % 32
        mask = present[:, None] & (lane < INPUTS)[None, :]
        some = tl.load(some_at + lane[None, :], mask=mask, other=0.0)
        total = tl.dot(some, tl.trans(tl.reshape(low.to(some.dtype), [BLOCK_N, BLOCK_K // 2])), total)
        some = tl.load(some_at + lane[None, :] + 32, mask=mask, other=0.0)
        total = tl.dot(some, tl.trans(tl.reshape(high.to(some.dtype), [BLOCK_N, BLOCK_K // 2])), total)
    _store_few(out, total, bias, output, row, real, present, rows, OUTPUTS, BIASED)


@kernel
def _store_few(out: tl.tensor, total: tl.tensor, bias: tl.tensor, output: tl.tensor, row: tl.tensor,
               real: tl.tensor, present: tl.tensor, rows: tl.tensor, OUTPUTS: tl.constexpr,
               BIASED: tl.constexpr) -> None:
    """Store a tile of sums. The bias is added to the first split only."""
    split = tl.program_id(2)
    if BIASED:
        added = tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
        total += tl.where(split == 0, added, 0.0)[None, :]
    at = (split * rows + row).to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=present[:, None] & real[None, :])


@kernel
def sum_kernel(out: tl.tensor, parts: tl.tensor, size: tl.tensor, SPLITS: tl.constexpr,
               BLOCK: tl.constexpr) -> None:
    """Sum the splits of each number, in their order, so the result does not vary. Grid (size / BLOCK,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + part * size + at, mask=known, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=known)


@kernel
def unpack_int8_kernel(out: tl.tensor, numbers: tl.tensor, scales: tl.tensor, WIDTH: tl.constexpr,
                       BLOCK: tl.constexpr) -> None:
    """Unpack 8-bit weights. Grid (outputs, WIDTH / BLOCK)."""
    output = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(numbers + output * WIDTH + lane, mask=lane < WIDTH, other=0).to(tl.float32)
    found *= tl.load(scales + output)
    tl.store(out + output * WIDTH + lane, found.to(out.dtype.element_ty), mask=lane < WIDTH)


@kernel
def unpack_int4_kernel(out: tl.tensor, numbers: tl.tensor, scales: tl.tensor, WIDTH: tl.constexpr,
                       HALF: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Unpack 4-bit weights. Grid (outputs, WIDTH / BLOCK)."""
    output = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = lane < WIDTH
    packed = tl.load(numbers + output * WIDTH + lane, mask=known, other=0)
    group = lane // HALF
    at = scales + (output * (WIDTH // HALF) + group) * 2
    scale = tl.load(at, mask=known, other=0.0).to(tl.float32)
    least = tl.load(at + 1, mask=known, other=0.0).to(tl.float32)
    to = out + output * WIDTH * 2 + group * (2 * HALF) + lane % HALF
    low = (packed & 15).to(tl.float32) * scale + least
    high = (packed >> 4).to(tl.float32) * scale + least
    tl.store(to, low.to(out.dtype.element_ty), mask=known)
    tl.store(to + HALF, high.to(out.dtype.element_ty), mask=known)
