"""Linears of a lone row, where nothing counts but reading the weights once, at the memory's full rate.

Each program takes a few outputs and reads their rows of the matrix end to end. The norm in front, the gate
behind and the sum with the residual go along for nothing: each of them alone would be a kernel that lasts
longer to start than to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from convoy.model.gpu.language import kernel, next_power


@dataclass(frozen=True)
class Tile:
    """How many outputs and inputs a program holds at once, and its warps."""

    outputs: int
    inputs: int
    num_warps: int

    def fitted(self, num_inputs: int) -> Tile:
        """No wider than the matrix."""
        return Tile(self.outputs, min(self.inputs, next_power(num_inputs)), self.num_warps)


# candidates of `bench.cuda`, which says what each of them reached
TILES = (Tile(2, 1024, 4), Tile(4, 512, 4), Tile(4, 1024, 4), Tile(8, 512, 4), Tile(4, 1024, 8))
PLAIN_TILE = Tile(4, 1024, 8)
GATED_TILE = Tile(4, 1024, 4)


def lone_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
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
    """``x`` [1, inputs] times ``weight`` [outputs, inputs]: [1, outputs] in ``dtype``, or that of ``x``.

    ``norm``: of the RMS norm of ``x`` first. ``gated``: silu of the first half of the outputs times the
    second. ``adds``: into ``out``, which is the residual.
    """
    num_inputs = x.shape[1]
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(1, num_outputs, dtype=dtype or x.dtype, device=x.device)
    tile = (tile or (GATED_TILE if gated else PLAIN_TILE)).fitted(num_inputs)
    lone_linear_kernel[-(-num_outputs // tile.outputs),](
        out, x, weight, x if bias is None else bias, x if norm is None else norm, eps, INPUTS=num_inputs,
        OUTPUTS=num_outputs, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs, BIASED=bias is not None,
        NORMED=norm is not None, ADDS=adds, GATED=gated, num_warps=tile.num_warps,
    )  # fmt: skip
    return out


# fmt: off


@kernel
def lone_linear_kernel(out: tl.tensor, x: tl.tensor, weight: tl.tensor, bias: tl.tensor, norm: tl.tensor,
                       eps: tl.tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
                       ADDS: tl.constexpr, GATED: tl.constexpr) -> None:
    """Grid (OUTPUTS / BLOCK_N,)"""
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
    if BIASED:
        found += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(ups, 1) * spread
        if BIASED:
            other += tl.load(bias + OUTPUTS + output, mask=real, other=0.0).to(tl.float32)
        found = found * tl.sigmoid(found) * other
    if ADDS:
        found += tl.load(out + output, mask=real, other=0.0).to(tl.float32)
    tl.store(out + output, found.to(out.dtype.element_ty), mask=real)
