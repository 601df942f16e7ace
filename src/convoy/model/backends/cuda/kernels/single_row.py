"""Multiply a lone row, which costs only reading the weights once, at the memory's full rate.

Each program takes a few outputs and reads their rows of the matrix end to end. The norm in front, the gate
behind and the residual sum are fused at no cost: as a kernel of its own, each would take longer to start
than to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from convoy.model.backends.cuda.kernels.language import kernel, next_power
from convoy.model.backends.cuda.kernels.rounded import GROUP, Matrix


@dataclass(frozen=True)
class Tile:
    """Describe how many outputs and inputs a program holds at once, and its number of warps."""

    outputs: int
    inputs: int
    num_warps: int

    def fitted(self, num_inputs: int) -> Tile:
        """Return this tile, made no wider than a matrix of ``num_inputs`` inputs."""
        return Tile(self.outputs, min(self.inputs, next_power(num_inputs)), self.num_warps)


# The candidates that `comparisons.cuda.single` measures and reports.
TILES = (Tile(2, 1024, 4), Tile(4, 512, 4), Tile(4, 1024, 4), Tile(8, 512, 4), Tile(4, 1024, 8))
PLAIN_TILE = Tile(4, 1024, 8)
GATED_TILE = Tile(4, 1024, 4)
# The candidates for rounded weights.
INT8_TILES = (Tile(4, 1024, 4), Tile(4, 2048, 4), Tile(8, 2048, 4), Tile(8, 1024, 4), Tile(4, 512, 4))
INT4_TILES = (Tile(4, 1024, 4), Tile(4, 2048, 4), Tile(8, 1024, 4), Tile(8, 2048, 8), Tile(4, 2048, 8))
_DEFAULTS = {
    (16, False): PLAIN_TILE,
    (16, True): GATED_TILE,
    (8, False): INT8_TILES[1],
    (8, True): INT8_TILES[0],
    (4, False): INT4_TILES[0],
    (4, True): INT4_TILES[0],
}


def lone_linear(
    x: torch.Tensor,
    weight: Matrix,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    adds: bool = False,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return ``x`` [1, inputs] times ``weight`` [outputs, inputs]: [1, outputs].

    The result has ``dtype``, or that of ``x``. ``norm`` has the weights of an RMS norm that is applied to
    ``x`` first. ``gated`` returns silu of the first half of the outputs times the second half. ``adds``
    adds the result to ``out``, which is the residual.
    """
    num_inputs = x.shape[1]
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(1, num_outputs, dtype=dtype or x.dtype, device=x.device)
    numbers, scales = (weight, x) if isinstance(weight, torch.Tensor) else (weight.numbers, weight.scales)
    words = None if isinstance(weight, torch.Tensor) else weight.words()
    common = {
        "BIASED": bias is not None, "NORMED": norm is not None, "ADDS": adds, "GATED": gated,
        "INPUTS": num_inputs, "OUTPUTS": num_outputs,
    }  # fmt: skip
    beside = (x if bias is None else bias, x if norm is None else norm, eps)
    bits = 16 if isinstance(weight, torch.Tensor) else weight.bits
    tile = (tile or _DEFAULTS[bits, gated]).fitted(num_inputs)
    common |= {"BLOCK_N": tile.outputs, "num_warps": tile.num_warps}
    grid = (-(-num_outputs // tile.outputs),)
    if bits == 4:
        groups = max(1, tile.inputs // GROUP)
        lone_int4_kernel[grid](out, x, numbers, scales, *beside, BLOCK_G=groups, HALF=GROUP // 2, **common)
    elif words is None:
        lone_linear_kernel[grid](
            out, x, numbers, scales, *beside, BLOCK_K=tile.inputs, SCALED=bits == 8, **common
        )  # fmt: skip
    else:
        lone_int8_kernel[grid](out, x, words, scales, *beside, BLOCK_W=max(1, tile.inputs // 4), **common)
    return out


# fmt: off


@kernel
def lone_linear_kernel(out: tl.tensor, x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor,
                       norm: tl.tensor, eps: tl.tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
                       BIASED: tl.constexpr, NORMED: tl.constexpr, ADDS: tl.constexpr,
                       GATED: tl.constexpr) -> None:
    """Multiply by bfloat16 or plain 8-bit weights. Grid (OUTPUTS / BLOCK_N,)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = output < OUTPUTS
    first = weight + output.to(tl.int64)[:, None] * INPUTS
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        lane = start + tl.arange(0, BLOCK_K)
        known = lane < INPUTS
        both = real[:, None] & known[None, :]
        row = tl.load(first + lane[None, :], mask=both, other=0.0, eviction_policy="evict_first")
        numbers = tl.load(x + lane, mask=known, other=0.0).to(tl.float32)
        # The norm's factor is one number for the row, so it is applied once to the sums below. Its squares
        # are collected while the weights are read.
        if NORMED:
            squares += numbers * numbers
            numbers *= tl.load(norm + lane, mask=known, other=0.0).to(tl.float32)
        total += row.to(tl.float32) * numbers[None, :]
        if GATED:
            row = tl.load(first + OUTPUTS * INPUTS + lane[None, :], mask=both, other=0.0,
                          eviction_policy="evict_first")
            ups += row.to(tl.float32) * numbers[None, :]
    spread = 1.0
    if NORMED:
        spread = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    found = tl.sum(total, 1) * spread
    other = found
    if GATED:
        other = tl.sum(ups, 1) * spread
    if SCALED:
        found *= tl.load(scales + output, mask=real, other=0.0)
        if GATED:
            other *= tl.load(scales + OUTPUTS + output, mask=real, other=0.0)
    _finish(out, found, other, bias, output, real, OUTPUTS, BIASED, ADDS, GATED)


@kernel
def lone_int8_kernel(out: tl.tensor, x: tl.tensor, words: tl.tensor, scales: tl.tensor, bias: tl.tensor,
                     norm: tl.tensor, eps: tl.tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BIASED: tl.constexpr,
                     NORMED: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr) -> None:
    """Multiply by 8-bit weights, read four to a word. Grid (OUTPUTS / BLOCK_N,)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = output < OUTPUTS
    total = tl.zeros([BLOCK_N, BLOCK_W], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_W], dtype=tl.float32)
    squares = tl.zeros([BLOCK_W], dtype=tl.float32)
    width: tl.constexpr = INPUTS // 4
    first = words + output.to(tl.int64)[:, None] * width
    for start in range(0, width, BLOCK_W):
        lane = start + tl.arange(0, BLOCK_W)
        known = lane < width
        both = real[:, None] & known[None, :]
        # The XOR flips each byte's sign bit: the bytes are now unsigned and 128 too large, which is taken off
        # below.
        row = tl.load(first + lane[None, :], mask=both, other=0, eviction_policy="evict_first") ^ -2139062144
        if GATED:
            above = tl.load(first + OUTPUTS * width + lane[None, :], mask=both, other=0,
                            eviction_policy="evict_first") ^ -2139062144
        for place in tl.static_range(4):
            some = tl.load(x + lane * 4 + place, mask=known, other=0.0).to(tl.float32)
            if NORMED:
                squares += some * some
                some *= tl.load(norm + lane * 4 + place, mask=known, other=0.0).to(tl.float32)
            total += (_whole((row >> (8 * place)) & 255) - 128.0) * some[None, :]
            if GATED:
                ups += (_whole((above >> (8 * place)) & 255) - 128.0) * some[None, :]
    spread = 1.0
    if NORMED:
        spread = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    found = tl.sum(total, 1) * spread * tl.load(scales + output, mask=real, other=0.0)
    other = found
    if GATED:
        other = tl.sum(ups, 1) * spread * tl.load(scales + OUTPUTS + output, mask=real, other=0.0)
    _finish(out, found, other, bias, output, real, OUTPUTS, BIASED, ADDS, GATED)


@kernel
def lone_int4_kernel(out: tl.tensor, x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor,
                     norm: tl.tensor, eps: tl.tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, HALF: tl.constexpr, BIASED: tl.constexpr,
                     NORMED: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr) -> None:
    """Multiply by 4-bit weights, packed as in `kernels.rounded`. Grid (OUTPUTS / BLOCK_N,)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = output < OUTPUTS
    within = tl.arange(0, HALF)
    total = tl.zeros([BLOCK_N, BLOCK_G, HALF], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_G, HALF], dtype=tl.float32)
    squares = tl.zeros([BLOCK_G, HALF], dtype=tl.float32)
    groups: tl.constexpr = INPUTS // (2 * HALF)
    for start in range(0, groups, BLOCK_G):
        group = start + tl.arange(0, BLOCK_G)
        lane = group[:, None] * (2 * HALF) + within[None, :]
        known = (group < groups)[:, None] & (within < HALF)[None, :]
        low = tl.load(x + lane, mask=known, other=0.0).to(tl.float32)
        high = tl.load(x + lane + HALF, mask=known, other=0.0).to(tl.float32)
        if NORMED:
            squares += low * low + high * high
            low *= tl.load(norm + lane, mask=known, other=0.0).to(tl.float32)
            high *= tl.load(norm + lane + HALF, mask=known, other=0.0).to(tl.float32)
        total += _int4_products(weight, scales, output, real, group, within, low, high, groups, HALF)
        if GATED:
            ups += _int4_products(weight, scales, output + OUTPUTS, real, group, within, low, high, groups,
                                  HALF)
    spread = 1.0
    if NORMED:
        spread = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / INPUTS + eps)
    found = tl.sum(tl.sum(total, 2), 1) * spread
    other = found
    if GATED:
        other = tl.sum(tl.sum(ups, 2), 1) * spread
    _finish(out, found, other, bias, output, real, OUTPUTS, BIASED, ADDS, GATED)


@kernel
def _int4_products(weight: tl.tensor, scales: tl.tensor, output: tl.tensor, real: tl.tensor,
                   group: tl.tensor, within: tl.tensor, low: tl.tensor, high: tl.tensor,
                   GROUPS: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """Return [BLOCK_N, BLOCK_G, HALF]: the sum of the two products of each byte."""
    at = output.to(tl.int64)[:, None] * GROUPS + group[None, :]
    both = real[:, None] & (group < GROUPS)[None, :]
    scale = tl.load(scales + at * 2, mask=both, other=0.0).to(tl.float32)
    least = tl.load(scales + at * 2 + 1, mask=both, other=0.0).to(tl.float32)
    packed = tl.load(weight + at[:, :, None] * HALF + within[None, None, :], mask=both[:, :, None], other=0,
                     eviction_policy="evict_first").to(tl.int32)
    # Each byte holds inputs that lie 32 apart, so both halves load runs of ``x``.
    found = _whole(packed & 15) * low[None, :, :] + _whole(packed >> 4) * high[None, :, :]
    return found * scale[:, :, None] + (low + high)[None, :, :] * least[:, :, None]


@kernel
def _whole(number: tl.tensor) -> tl.tensor:
    """Return float32 of an int32 below 2^23 through its bits.

    Conversions run at an eighth of the rate of sums.
    """
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@kernel
def _finish(out: tl.tensor, found: tl.tensor, other: tl.tensor, bias: tl.tensor, output: tl.tensor,
            real: tl.tensor, OUTPUTS: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
            GATED: tl.constexpr) -> None:
    """Apply bias, gate and residual, and store. ``other`` is the second half of a gated pair."""
    if BIASED:
        found += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            other += tl.load(bias + OUTPUTS + output, mask=real, other=0.0).to(tl.float32)
        found = found * tl.sigmoid(found) * other
    if ADDS:
        found += tl.load(out + output, mask=real, other=0.0).to(tl.float32)
    tl.store(out + output, found.to(out.dtype.element_ty), mask=real)
