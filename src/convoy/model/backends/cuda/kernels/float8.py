"""Multiply rows by weights on the tensor cores, both rounded to floats of 8 bits (E4M3).

Each row, and each output of the weights, has a scale: its greatest magnitude becomes 448, the greatest number
of E4M3. A row's scale depends on the row alone, so its numbers are the same in every batch. Products are
summed in float32 and scaled once. A lone row is not rounded (`single_row`): it is as fast without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch.nn.functional import ScalingType, linear, scaled_mm

from convoy.errors import ModelError
from convoy.model.backends.cuda.kernels.few_rows import shared_room, sum_kernel
from convoy.model.backends.cuda.kernels.forms import DeviceMatrix, DeviceRange
from convoy.model.backends.cuda.kernels.language import kernel, next_power

GREATEST = 448.0
# The library's product takes inputs and outputs in such units.
_UNIT = 16
_LEAST_ROWS, _MOST_OWN_ROWS, _MOST_SPLIT_ROWS, _MOST_OWN_OUTPUTS = 16, 64, 256, 8192
# The first cards with such products.
_LEAST_CAPABILITY = (8, 9)


def require_float8(device: torch.device) -> None:
    """Raise ModelError for a card without products of 8-bit floats."""
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        raise ModelError(
            f"{device} has compute capability {found[0]}.{found[1]}, and products of 8-bit floats need "
            f"{_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]}",
            hint="leave out --compute fp8, or round the weights with --quantize q8",
        )


def fits_float8(outputs: int, inputs: int) -> bool:
    """Return whether `multiply_float8` takes a matrix of this shape."""
    return outputs % _UNIT == 0 and inputs % _UNIT == 0


def round_to_float8(values: torch.Tensor, name: str) -> DeviceMatrix:
    """Return ``values`` [outputs, inputs] rounded. Raises ModelError for one that is no number."""
    greatest = values.abs().amax(1, keepdim=True).to(torch.float32)
    if not bool(torch.isfinite(greatest).all()):
        raise ModelError(f"{name} holds a value that is not a number")
    scales = torch.where(greatest > 0, greatest / GREATEST, torch.ones_like(greatest))
    return of_float8((values / scales).to(torch.float8_e4m3fn), scales)


def of_float8(codes: torch.Tensor, scales: torch.Tensor) -> DeviceMatrix:
    """Return the matrix of float8 ``codes`` [outputs, inputs] and ``scales`` [outputs, 1]."""
    whole = DeviceRange(
        *(codes.contiguous(), scales.to(torch.float32).contiguous(), None, None, None),
        *(8, codes.shape[1], 0),
    )
    return DeviceMatrix((whole,), rounds_rows=True)


@dataclass(frozen=True)
class Float8Tile:
    """Describe a tile of outputs and inputs, the splits of all inputs, the stages of loads, and rows."""

    outputs: int
    inputs: int
    splits: int
    num_stages: int
    rows: int = 64
    num_warps: int = 4

    @property
    def num_bytes(self) -> int:
        """Return the bytes of shared memory that its loads take."""
        return self.num_stages * self.inputs * (self.rows + self.outputs)


def float8_tile(rows: int, outputs: int, inputs: int) -> Float8Tile | None:
    """Return the tile of our own kernel, or None where the library's product takes less time (one H200)."""
    if _MOST_OWN_ROWS < rows <= _MOST_SPLIT_ROWS and inputs > 2 * outputs and inputs % 512 == 0:
        # Few outputs: the library leaves half of the card idle.
        return Float8Tile(128, 256, 2, 3, rows=128, num_warps=8)
    if rows > _MOST_OWN_ROWS or outputs > _MOST_OWN_OUTPUTS:
        return None
    splits = 1 if outputs > 4096 else 4 if inputs > 2 * outputs or rows <= _LEAST_ROWS else 2
    return Float8Tile(64, 256, splits, 4) if inputs % (256 * splits) == 0 else None


@dataclass(frozen=True)
class RoundedRows:
    """Hold rows [rows, inputs] as float8 ``codes``, and their ``scales``, float32 [rows, 1]."""

    codes: torch.Tensor
    scales: torch.Tensor
    # Of the rows before, and of their products.
    dtype: torch.dtype

    @classmethod
    def empty(cls, rows: int, inputs: int, like: torch.Tensor) -> RoundedRows:
        """Return uninitialised rows, on the device and with the dtype of ``like``."""
        codes = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=like.device)
        return cls(codes, torch.empty(rows, 1, dtype=torch.float32, device=like.device), like.dtype)

    def dense(self) -> torch.Tensor:
        """Return the rounded numbers as float32."""
        return self.codes.to(torch.float32) * self.scales


def multiply_float8(
    x: torch.Tensor | RoundedRows, weight: DeviceMatrix, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``x`` [rows, inputs] times ``weight`` [outputs, inputs], in the dtype of the rows."""
    (one,) = weight.ranges
    rows = x if isinstance(x, RoundedRows) else round_rows(x)
    if not rows.codes.is_cuda:
        # Triton's interpreter runs where the library has no such product.
        found = linear(rows.dense(), weight.dense())
        return (found if bias is None else found + bias).to(rows.dtype)
    tile = float8_tile(rows.codes.shape[0], *one.shape)
    if tile is not None and tile.num_bytes <= shared_room(rows.codes):
        return few_float8(rows, one, bias, tile)
    return scaled_mm(
        *(rows.codes, one.codes.t()),
        *(rows.scales, ScalingType.RowWise, one.scales.t(), ScalingType.RowWise),
        bias=bias,
        output_dtype=rows.dtype,
        use_fast_accum=True,
    )


def few_float8(
    rows: RoundedRows, one: DeviceRange, bias: torch.Tensor | None, tile: Float8Tile
) -> torch.Tensor:
    """Return the product of `multiply_float8` by our own kernel, which splits a small matrix's inputs."""
    (count, inputs), outputs = rows.codes.shape, one.shape[0]
    out = torch.empty(count, outputs, dtype=rows.dtype, device=rows.codes.device)
    splits = tile.splits
    parts = out if splits == 1 else out.new_empty(splits, count, outputs, dtype=torch.float32)
    block = min(tile.rows, next_power(count, _LEAST_ROWS))
    float8_kernel[-(-outputs // tile.outputs), -(-count // block), splits](
        parts, rows.codes, rows.scales, one.codes, one.scales, out if bias is None else bias, count,
        INPUTS=inputs, OUTPUTS=outputs, BLOCK_M=block, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
        SPLITS=splits, BIASED=bias is not None, STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )  # fmt: skip
    if splits > 1:
        size = count * outputs
        sum_kernel[-(-size // 1024),](
            out, parts, size, out.stride(0), OUTPUTS=outputs, SPLITS=splits, BLOCK=1024
        )
    return out


def round_rows(x: torch.Tensor) -> RoundedRows:
    """Return ``x`` [rows, inputs] rounded."""
    count, inputs = x.shape
    if not x.is_cuda:
        # Triton's interpreter does not round to the nearest number.
        greatest = x.abs().amax(1, keepdim=True).to(torch.float32)
        scales = torch.where(greatest > 0, greatest / GREATEST, torch.ones_like(greatest))
        return RoundedRows((x.to(torch.float32) / scales).to(torch.float8_e4m3fn), scales, x.dtype)
    found, pad = RoundedRows.empty(count, inputs, x), next_power(inputs)
    round_rows_kernel[count,](
        found.codes, found.scales, x, x.stride(0), INPUTS=inputs, PAD=pad, num_warps=num_warps_of(pad)
    )
    return found


def num_warps_of(pad: int) -> int:
    """Return the warps of a program that holds a row of ``pad`` numbers."""
    return max(4, min(16, pad // 1024))


# fmt: off


@kernel
def float8_kernel(out: tl.tensor, codes: tl.tensor, scales: tl.tensor, weight: tl.tensor,
                  weight_scales: tl.tensor, bias: tl.tensor, rows: tl.tensor, INPUTS: tl.constexpr,
                  OUTPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  SPLITS: tl.constexpr, BIASED: tl.constexpr, STAGES: tl.constexpr) -> None:
    """Multiply rows by one tile of outputs. Grid (OUTPUTS / BLOCK_N, rows / BLOCK_M, SPLITS)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    steps: tl.constexpr = INPUTS // BLOCK_K // SPLITS
    lane = tl.arange(0, BLOCK_K)
    # Rows and outputs beyond the last repeat it, and are not stored.
    some, own = tl.minimum(row, rows - 1), tl.minimum(output, OUTPUTS - 1)
    codes_at = codes + some.to(tl.int64)[:, None] * INPUTS + lane[None, :]
    weight_at = weight + own.to(tl.int64)[None, :] * INPUTS + lane[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = (split * steps + step) * BLOCK_K
        total = tl.dot(tl.load(codes_at + at), tl.load(weight_at + at), total)
    total *= tl.load(scales + some)[:, None] * tl.load(weight_scales + own)[None, :]
    if BIASED:
        total += tl.where(split == 0, tl.load(bias + own).to(tl.float32), 0.0)[None, :]
    to = (split.to(tl.int64) * rows + row)[:, None] * OUTPUTS + output[None, :]
    known = (row < rows)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=known)


@kernel
def round_rows_kernel(codes: tl.tensor, scales: tl.tensor, x: tl.tensor, stride: tl.tensor,
                      INPUTS: tl.constexpr, PAD: tl.constexpr) -> None:
    """Round one row. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PAD)
    known = lane < INPUTS
    numbers = tl.load(x + row * stride + lane, mask=known, other=0.0).to(tl.float32)
    store_rounded(codes, scales, numbers, row, lane, known, INPUTS)


@kernel
def store_rounded(codes: tl.tensor, scales: tl.tensor, numbers: tl.tensor, row: tl.tensor, lane: tl.tensor,
                  known: tl.tensor, INPUTS: tl.constexpr) -> None:
    """Store a row of float32 numbers, rounded, and its scale."""
    greatest = tl.max(tl.abs(numbers), 0)
    scale = tl.where(greatest > 0.0, greatest / 448.0, 1.0)
    tl.store(scales + row, scale)
    tl.store(codes + row * INPUTS + lane, (numbers / scale).to(codes.dtype.element_ty), mask=known)
