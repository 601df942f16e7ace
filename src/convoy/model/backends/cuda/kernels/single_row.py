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
CODE_TILES = (Tile(8, 64, 2), Tile(4, 64, 2), Tile(4, 32, 1), Tile(8, 32, 1), Tile(8, 128, 4))
# The outputs from which a warp for each tile is best with 8 bits, and those for large tiles with 4.
_MANY_OUTPUTS, _SOME_OUTPUTS = 16384, 6144


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
        return Tile(8, 128, 4) if gated else Tile(8, 64, 2) if outputs >= _SOME_OUTPUTS else Tile(4, 64, 2)
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
        OUTPUTS=outputs, BLOCK_N=tile.outputs, BLOCK_U=block, num_warps=tile.num_warps, PACKED=x.is_cuda,
        **one.constants, **common,
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
                      GATED: tl.constexpr, PACKED: tl.constexpr) -> None:
    """Multiply by codes, read as words of 32 bits. Grid (OUTPUTS / BLOCK_N,).

    A unit is 16 inputs with 8 bits, and 32 with 4. A group has whole units, and its scale is applied to the
    sum of a word's products.
    """
    # All tensors are [units, outputs, words]. With other orders or with fewer dimensions, Triton gives the
    # loads different layouts, and moves numbers between threads.
    output = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    total = tl.zeros([BLOCK_U, BLOCK_N, 1], dtype=tl.float32)
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
        above = row
        if GATED:
            above = tl.load(at + OUTPUTS * units * 4, mask=both, other=0, eviction_policy="evict_first")
        part, other, amount, squares = _units(row, above, x, norm, unit, within, known, squares, BLOCK_U,
                                              BLOCK_N, BITS, FLOATS, NORMED, GATED, PACKED)
        total += _scaled(part, amount, scales, least, outers, outer_least, output, unit, real, size, units,
                         GROUP, ZERO, LEAST, OUTER)
        if GATED:
            ups += _scaled(other, amount, scales, least, outers, outer_least, output + OUTPUTS, unit, real,
                           size, units, GROUP, ZERO, LEAST, OUTER)
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
def _units(row: tl.tensor, above: tl.tensor, x: tl.tensor, norm: tl.tensor, unit: tl.tensor,
           within: tl.tensor, known: tl.tensor, squares: tl.tensor, BLOCK_U: tl.constexpr,
           BLOCK_N: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, NORMED: tl.constexpr,
           GATED: tl.constexpr, PACKED: tl.constexpr) -> tl.tensor:
    """Return sums of units: of products with whole codes, the same of gated outputs, of ``x`` and squares."""
    part = tl.zeros([BLOCK_U, BLOCK_N, 4], dtype=tl.float32)
    amount = tl.zeros([BLOCK_U, 1, 4], dtype=tl.float32)
    other, small = part, amount
    # Two neighbours of ``x`` are one word too: the upper half of it is already a float32 number.
    for place in tl.static_range(2):
        lane = unit * 16 + place * 8 + within if BITS == 4 else unit * 8 + within * 2 + place
        low, high, squares = _two(x, norm, lane, known, squares, NORMED)
        if BITS == 4:
            # The codes of the first and the fourth place, then those of the third and the second.
            less, more, squares = _two(x, norm, lane + (12 - 16 * place), known, squares, NORMED)
            less, more = less * 16.0, more * 16.0
            small += less
            small += more
            part = _four(part, row, low, high, less, more, place, PACKED)
            if GATED:
                other = _four(other, above, low, high, less, more, place, PACKED)
        else:
            part = _two_bytes(part, row, low, high, place, FLOATS, PACKED)
            if GATED:
                other = _two_bytes(other, above, low, high, place, FLOATS, PACKED)
        amount += low
        amount += high
    # Codes were read as 128 too large, but for those of floats.
    excess = amount * (0.0 if FLOATS else 128.0)
    if BITS == 4:
        excess += small * 128.0
        amount += small * 0.0625
    excess = tl.sum(excess, 2, keep_dims=True)
    part = tl.sum(part, 2, keep_dims=True) - excess
    other = tl.sum(other, 2, keep_dims=True) - excess
    return part, other, tl.sum(amount, 2, keep_dims=True), squares


@kernel
def _two(x: tl.tensor, norm: tl.tensor, lane: tl.tensor, known: tl.tensor, squares: tl.tensor,
         NORMED: tl.constexpr) -> tl.tensor:
    """Return two neighbours of ``x`` times the norm's weights, and the sum of squares with theirs."""
    low, high = _halves(tl.load(x + lane, mask=known, other=0))
    if NORMED:
        squares += low * low
        squares += high * high
        some, more = _halves(tl.load(norm + lane, mask=known, other=0))
        low, high = low * some, high * more
    return low, high, squares


@kernel
def _four(part: tl.tensor, row: tl.tensor, low: tl.tensor, high: tl.tensor, less: tl.tensor, more: tl.tensor,
          place: tl.constexpr, PACKED: tl.constexpr) -> tl.tensor:
    """Add the products of four 4-bit codes of each word to the sums.

    One operation makes a float32 number of a code, where it is in the word or after a shift by a byte: 128
    and the code, or 128 and 1/16 of it. Numbers for the latter are 16 times as large.
    """
    if PACKED:
        if place == 0:
            one, two, three, four = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 t;
                prmt.b32 t, $4, $4, 0x1032;
                lop3.b32 $0, t, 0x000f0000, 0x43000000, 0xea;
                lop3.b32 $1, $4, 0x000f0000, 0x43000000, 0xea;
                lop3.b32 $2, $4, 0x0000f000, 0x43000000, 0xea;
                lop3.b32 $3, t, 0x0000f000, 0x43000000, 0xea;
                }
                """, "=f,=f,=f,=f,r", [row], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=True, pack=1)
        else:
            one, two, three, four = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 s, t;
                shl.b32 s, $4, 8;
                shr.b32 t, $4, 8;
                lop3.b32 $0, s, 0x000f0000, 0x43000000, 0xea;
                lop3.b32 $1, t, 0x000f0000, 0x43000000, 0xea;
                lop3.b32 $2, s, 0x0000f000, 0x43000000, 0xea;
                lop3.b32 $3, t, 0x0000f000, 0x43000000, 0xea;
                }
                """, "=f,=f,=f,=f,r", [row], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=True, pack=1)
    else:
        first = (row << 16) | ((row >> 16) & 0xFFFF) if place == 0 else row << 8
        second = row if place == 0 else row >> 8
        one, two = _magic(first & 0xF0000), _magic(second & 0xF0000)
        three = _magic((second if place == 0 else first) & 0xF000)
        four = _magic((first if place == 0 else second) & 0xF000)
    part += one * low
    part += two * high
    part += three * less
    part += four * more
    return part


@kernel
def _magic(code: tl.tensor) -> tl.tensor:
    return (code | 0x43000000).to(tl.float32, bitcast=True)


@kernel
def _two_bytes(part: tl.tensor, row: tl.tensor, low: tl.tensor, high: tl.tensor, place: tl.constexpr,
               FLOATS: tl.constexpr, PACKED: tl.constexpr) -> tl.tensor:
    """Add the products of two 8-bit codes of each word to the sums."""
    if PACKED and not FLOATS:
        if place == 0:
            one, two = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 t;
                xor.b32 t, $2, 0x80808080;
                prmt.b32 $0, t, 0x4b000000, 0x7540;
                prmt.b32 $1, t, 0x4b000000, 0x7541;
                }
                """, "=f,=f,r", [row], dtype=(tl.float32, tl.float32), is_pure=True, pack=1)
        else:
            one, two = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 t;
                xor.b32 t, $2, 0x80808080;
                prmt.b32 $0, t, 0x4b000000, 0x7542;
                prmt.b32 $1, t, 0x4b000000, 0x7543;
                }
                """, "=f,=f,r", [row], dtype=(tl.float32, tl.float32), is_pure=True, pack=1)
        one, two = one - 8388608.0, two - 8388608.0
    else:
        one, two = _byte(row, 2 * place, FLOATS), _byte(row, 2 * place + 1, FLOATS)
    part += one * low
    part += two * high
    return part


@kernel
def _scaled(part: tl.tensor, amount: tl.tensor, scales: tl.tensor, least: tl.tensor, outers: tl.tensor,
            outer_least: tl.tensor, output: tl.tensor, unit: tl.tensor, known: tl.tensor, SIZE: tl.constexpr,
            UNITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr,
            OUTER: tl.constexpr) -> tl.tensor:
    """Apply scales and least numbers to sums of units, [BLOCK_U, BLOCK_N, 1]."""
    groups: tl.constexpr = UNITS * SIZE // GROUP
    group = unit * SIZE // GROUP
    at = output.to(tl.int64) * groups + group
    scale = tl.load(scales + at, mask=known, other=0).to(tl.float32)
    if OUTER:
        outer = output.to(tl.int64) * (groups // OUTER) + group // OUTER
        scale *= tl.load(outers + outer, mask=known, other=0.0).to(tl.float32)
    part -= amount * (ZERO + 0.0)
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
