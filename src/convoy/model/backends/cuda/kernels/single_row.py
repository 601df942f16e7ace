"""Multiply a lone row, which costs only reading the weights once, at the memory's full rate.

Each program takes a few outputs and reads their rows of the matrix end to end. The norm in front, the gate
behind and the residual sum are fused at no cost: as a kernel of its own, each would take longer to start
than to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from convoy.model.backends.cuda.kernels.forms import DeviceMatrix, DeviceRange, Matrix
from convoy.model.backends.cuda.kernels.language import kernel, next_power
from convoy.model.backends.cuda.kernels.pointwise import gate


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
# The candidates for codes: outputs, units of 16 bytes, warps.
CODE_TILES = (Tile(8, 64, 2), Tile(4, 128, 4), Tile(4, 32, 1), Tile(8, 32, 1), Tile(8, 128, 4))
# The outputs from which a warp for each tile is best with 8 bits.
_MANY_OUTPUTS = 16384


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
    outputs = weight.shape[0]
    if gated and isinstance(weight, DeviceMatrix) and len(weight.ranges) > 1:
        return gate(lone_linear(x, weight, bias=bias, norm=norm, eps=eps, dtype=dtype, tile=tile))
    num_outputs = outputs // 2 if gated else outputs
    if out is None:
        out = torch.empty(1, num_outputs, dtype=dtype or x.dtype, device=x.device)
    common = {"BIASED": bias is not None, "NORMED": norm is not None, "ADDS": adds, "GATED": gated}
    if isinstance(weight, torch.Tensor):
        beside = (x if bias is None else bias, x if norm is None else norm, eps)
        plain = (tile or (GATED_TILE if gated else PLAIN_TILE)).fitted(x.shape[1])
        lone_linear_kernel[-(-num_outputs // plain.outputs),](
            out, x, weight, *beside, BLOCK_K=plain.inputs, BLOCK_N=plain.outputs, num_warps=plain.num_warps,
            INPUTS=x.shape[1], OUTPUTS=num_outputs, **common,
        )  # fmt: skip
        return out
    first = 0
    for one in weight.ranges:
        last = first + one.shape[0]
        own = slice(0, num_outputs) if gated else slice(first, last)
        _lone_codes(x, one, None if bias is None else bias[first:last], norm, eps, out[:, own], tile, common)
        first = last
    return out


def _code_tile(bits: int, outputs: int, *, gated: bool) -> Tile:
    if bits == 4:
        return Tile(4, 128, 4) if gated else Tile(8, 64, 2)
    if gated:
        return Tile(4, 32, 1)
    return Tile(8, 32, 1) if outputs >= _MANY_OUTPUTS else Tile(8, 128, 4)


def _lone_codes(
    x: torch.Tensor,
    one: DeviceRange,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    tile: Tile | None,
    common: dict[str, bool],
) -> None:
    outputs = out.shape[1]
    # Pairs of neighbours are read as one word.
    pairs = x.to(torch.bfloat16).view(torch.int32)
    norms = pairs if norm is None else norm.to(torch.bfloat16).view(torch.int32)
    words = one.codes.view(torch.int32)
    tile = tile or _code_tile(one.bits, outputs, gated=common["GATED"])
    block = min(tile.inputs, next_power(words.shape[1] // 4))
    lone_codes_kernel[-(-outputs // tile.outputs),](
        *(out, pairs, words, *one.arguments, x if bias is None else bias, norms, eps), INPUTS=x.shape[1],
        OUTPUTS=outputs, BLOCK_N=tile.outputs, BLOCK_U=block, num_warps=tile.num_warps, **one.constants,
        **common,
    )  # fmt: skip


# fmt: off


@kernel
def lone_linear_kernel(out: tl.tensor, x: tl.tensor, weight: tl.tensor, bias: tl.tensor, norm: tl.tensor,
                       eps: tl.tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
                       ADDS: tl.constexpr, GATED: tl.constexpr) -> None:
    """Multiply by bfloat16 weights. Grid (OUTPUTS / BLOCK_N,)."""
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
    _finish(out, found, other, bias, output, real, OUTPUTS, BIASED, ADDS, GATED)


@kernel
def lone_codes_kernel(out: tl.tensor, x: tl.tensor, words: tl.tensor, scales: tl.tensor, least: tl.tensor,
                      outers: tl.tensor, outer_least: tl.tensor, bias: tl.tensor, norm: tl.tensor,
                      eps: tl.tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BITS: tl.constexpr,
                      GROUP: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr, OUTER: tl.constexpr,
                      FLOATS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr,
                      BIASED: tl.constexpr, NORMED: tl.constexpr, ADDS: tl.constexpr,
                      GATED: tl.constexpr) -> None:
    """Multiply by codes, read as words of 32 bits. Grid (OUTPUTS / BLOCK_N,).

    A unit is 16 inputs with 8 bits, and 32 with 4. A group has whole units, and its scale is applied to the
    sum of a word's products.
    """
    # All tensors are [units, outputs, words]. With other orders or with fewer dimensions, Triton gives the
    # loads different layouts, and moves numbers between threads.
    output = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    total = tl.zeros([BLOCK_U, BLOCK_N, 4], dtype=tl.float32)
    ups, squares = total, tl.zeros([BLOCK_U, 1, 4], dtype=tl.float32)
    size: tl.constexpr = 128 // BITS
    units: tl.constexpr = INPUTS // size
    within = tl.arange(0, 4)[None, None, :]
    for start in range(0, units, BLOCK_U):
        unit = (start + tl.arange(0, BLOCK_U))[:, None, None]
        known = (unit < units) & (within < 4)
        real = (output < OUTPUTS) & (unit < units)
        both = real & known
        at = words + output.to(tl.int64) * (units * 4) + (unit * 4 + within)
        row = tl.load(at, mask=both, other=0, eviction_policy="evict_first")
        part = tl.zeros([BLOCK_U, BLOCK_N, 4], dtype=tl.float32)
        amount = tl.zeros([BLOCK_U, 1, 4], dtype=tl.float32)
        above, other = row, part
        if GATED:
            above = tl.load(at + OUTPUTS * units * 4, mask=both, other=0, eviction_policy="evict_first")
        # Two neighbours of ``x`` are one word too: the upper half of it is already a float32 number.
        for place in tl.static_range(4 if BITS == 4 else 2):
            lane = unit * 16 + place * 4 + within if BITS == 4 else unit * 8 + within * 2 + place
            low, high = _halves(tl.load(x + lane, mask=known, other=0))
            if NORMED:
                squares += low * low + high * high
                some, more = _halves(tl.load(norm + lane, mask=known, other=0))
                low, high = low * some, high * more
            amount += low + high
            part = _products(part, row, low, high, place, BITS, FLOATS)
            if GATED:
                other = _products(other, above, low, high, place, BITS, FLOATS)
        total += _scaled(part, amount, scales, least, outers, outer_least, output, unit, real, size, units,
                         BITS, GROUP, ZERO, LEAST, OUTER, FLOATS)
        if GATED:
            ups += _scaled(other, amount, scales, least, outers, outer_least, output + OUTPUTS, unit, real,
                           size, units, BITS, GROUP, ZERO, LEAST, OUTER, FLOATS)
    found = _summed(total, squares, eps, INPUTS, NORMED)
    beside = found
    if GATED:
        beside = _summed(ups, squares, eps, INPUTS, NORMED)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    _finish(out, found, beside, bias, output, output < OUTPUTS, OUTPUTS, BIASED, ADDS, GATED)


@kernel
def _summed(total: tl.tensor, squares: tl.tensor, eps: tl.tensor, INPUTS: tl.constexpr,
            NORMED: tl.constexpr) -> tl.tensor:
    """Sum the products of each output, and divide by the root of the mean square of ``x``."""
    found = tl.sum(tl.sum(total, 2), 0)
    if NORMED:
        found *= tl.rsqrt(tl.sum(squares) / INPUTS + eps)
    return found


@kernel
def _products(part: tl.tensor, row: tl.tensor, low: tl.tensor, high: tl.tensor, place: tl.constexpr,
              BITS: tl.constexpr, FLOATS: tl.constexpr) -> tl.tensor:
    """Add the products of two codes of each word to the sums."""
    if BITS == 4:
        # Codes stay where they are in the word, and ``x`` takes the power of two.
        part += _whole(row & (15 << (4 * place))) * (low * (1.0 / (1 << (4 * place))))
        part += _whole((row >> 16) & (15 << (4 * place))) * (high * (1.0 / (1 << (4 * place))))
    else:
        part += _byte(row, 2 * place, FLOATS) * low
        part += _byte(row, 2 * place + 1, FLOATS) * high
    return part


@kernel
def _scaled(part: tl.tensor, amount: tl.tensor, scales: tl.tensor, least: tl.tensor, outers: tl.tensor,
            outer_least: tl.tensor, output: tl.tensor, unit: tl.tensor, known: tl.tensor, SIZE: tl.constexpr,
            UNITS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
            LEAST: tl.constexpr, OUTER: tl.constexpr, FLOATS: tl.constexpr) -> tl.tensor:
    """Apply scales and least numbers to sums of words, [BLOCK_U, BLOCK_N, 4]."""
    groups: tl.constexpr = UNITS * SIZE // GROUP
    group = unit * SIZE // GROUP
    at = output.to(tl.int64) * groups + group
    scale = tl.load(scales + at, mask=known, other=0).to(tl.float32)
    if OUTER:
        outer = output.to(tl.int64) * (groups // OUTER) + group // OUTER
        scale *= tl.load(outers + outer, mask=known, other=0.0).to(tl.float32)
    # The bytes of whole numbers were read as 128 too large.
    part -= amount * (ZERO + (128.0 if BITS == 8 and not FLOATS else 0.0))
    if LEAST == 2:
        part -= amount * tl.load(least + at, mask=known, other=0).to(tl.float32)
    part *= scale
    if LEAST == 1:
        added = tl.load(least + at, mask=known, other=0).to(tl.float32)
        if OUTER:
            added *= tl.load(outer_least + outer, mask=known, other=0.0).to(tl.float32)
        part += amount * added
    return part


@kernel
def _halves(pair: tl.tensor) -> tl.tensor:
    """Return the two bfloat16 numbers of int32 words as float32, the lower first."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@kernel
def _byte(words: tl.tensor, place: tl.constexpr, FLOATS: tl.constexpr) -> tl.tensor:
    """Return a byte of each word as float32: an int8 number and 128, or a number of float8 (E4M3)."""
    if FLOATS:
        byte = words >> (8 * place)
        bits = (byte & 127) << 20 | (byte & 128) << 24
        # The exponent's bias is 7, and that of float32 127.
        found = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        found = _whole(((words >> (8 * place)) & 255) ^ 128)
    return found


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
