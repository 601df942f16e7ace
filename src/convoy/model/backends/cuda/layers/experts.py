"""Multiply tokens by the experts that their router chose, without a word of the host.

The pairs of a token and an expert are sorted by expert on the device, and cut into tiles of one expert each.
The number of tiles depends on the choice, so as many programs start as there could be, and those without a
tile end at once. A captured graph may therefore hold it. This is the layout of vLLM's fused experts
(https://github.com/vllm-project/vllm, `moe_align_block_size`). A row's sums do not depend on the rows beside
it. Many pairs are multiplied by the library's grouped product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from convoy.model.backends.cuda.kernels.language import kernel, next_power

EXPERTS_NAME = "convoy_cuda"
# Pairs of a tile: the least rows of a matrix product in Triton.
_ROWS = 16
_COLUMNS = 64
_DEPTH = 64
# More pairs than this take the library's product. On an H200 ours is faster up to 256 rows of 4 or 8 experts
# each, and the library's from 1,024 rows on, by up to two times.
MAX_PAIRS = 2048


@dataclass(frozen=True)
class ExpertTiles:
    """Hold the pairs of a step, sorted by expert, in tiles.

    ``order`` [pairs] has the number of each pair in the order of the router's choice. ``tiles`` int32
    [most, 3] has each tile's expert, first place in ``order``, and its end there; tiles that are not used
    are empty.
    """

    order: torch.Tensor
    tiles: torch.Tensor


def device_experts(
    experts: Any, hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Map [T, hidden] to the same shape, as the library's function does.

    ``numbers`` and ``weights`` are [T, chosen].
    """
    stack = experts.gate_up_proj if experts.has_gate else experts.up_proj
    if numbers.numel() > MAX_PAIRS and _can_group(stack, experts.down_proj):
        found: torch.Tensor = grouped_mm_experts_forward(experts, hidden, numbers, weights)
        return found
    num_rows, chosen = numbers.shape
    tiles = cut_by_expert(numbers, experts.num_experts)
    bias = None
    if experts.has_bias:
        bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
    between = multiply_by_experts(
        hidden, stack, tiles, bias=bias, is_transposed=experts.is_transposed, chosen=chosen
    )
    between = experts._apply_gate(between) if experts.has_gate else experts.act_fn(between)
    bias = experts.down_proj_bias if experts.has_bias else None
    out = multiply_by_experts(
        between, experts.down_proj, tiles, bias=bias, is_transposed=experts.is_transposed
    )
    # Older releases of the library (5.17) have no such norm.
    if getattr(experts, "has_post_expert_norm", False):
        out = experts.post_expert_norm(out)
    # Products of bfloat16 are exact in float32, and the sum over a row's experts is rounded once.
    shares = weights.reshape(num_rows, chosen, 1).float()
    return (out.view(num_rows, chosen, -1).float() * shares).sum(dim=1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, device_experts)


def cut_by_expert(numbers: torch.Tensor, num_experts: int) -> ExpertTiles:
    """Return the tiles of a router's choice, ``numbers`` [T, chosen]."""
    num_pairs = numbers.numel()
    if num_pairs > MAX_PAIRS:
        return sort_by_expert(numbers, num_experts)
    # Each expert fills all its tiles but one.
    most = min(num_pairs, num_pairs // _ROWS + num_experts)
    memory = torch.zeros(3 * most + num_experts, dtype=torch.int32, device=numbers.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=numbers.device)
    cut_kernel[1,](
        *(order, memory, numbers.contiguous(), num_pairs),
        MOST=most,
        EXPERTS=num_experts,
        EXPERTS_PAD=next_power(num_experts + 1),
        PAIRS_PAD=next_power(num_pairs, _ROWS),
        ROWS=_ROWS,
        num_warps=8 if num_pairs > 512 else 4,
    )
    return ExpertTiles(order, memory[: 3 * most].view(most, 3))


def sort_by_expert(numbers: torch.Tensor, num_experts: int) -> ExpertTiles:
    """Return the tiles of `cut_by_expert` for any number of pairs, in many kernels of the library's."""
    flat = numbers.reshape(-1)
    order = torch.argsort(flat, stable=True)
    every = torch.arange(num_experts, device=flat.device)
    ends = torch.searchsorted(flat.index_select(0, order), every, right=True)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    of_expert = (ends - begins + _ROWS - 1) // _ROWS
    last = of_expert.cumsum(0)
    most = min(len(flat), len(flat) // _ROWS + num_experts)
    tile = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(last, tile, right=True).clamp_(max=num_experts - 1)
    first = begins[expert] + (tile - last[expert] + of_expert[expert]) * _ROWS
    end = torch.minimum(first + _ROWS, ends[expert])
    return ExpertTiles(order, torch.stack((expert, first, end), dim=1).to(torch.int32))


def multiply_by_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: ExpertTiles,
    *,
    bias: torch.Tensor | None,
    is_transposed: bool,
    chosen: int = 1,
) -> torch.Tensor:
    """Return [pairs, outputs]: row ``pair // chosen`` of ``x`` times the expert of each pair.

    ``weight`` is [experts, outputs, inputs], or [experts, inputs, outputs] if ``is_transposed``; ``bias`` is
    [experts, outputs].
    """
    x = x.contiguous()
    inputs, outputs = weight.shape[1:] if is_transposed else weight.shape[:0:-1]
    of_input, of_output = weight.stride()[1:] if is_transposed else weight.stride()[:0:-1]
    out = x.new_empty(len(tiles.order), outputs)
    experts_kernel[len(tiles.tiles), -(-outputs // _COLUMNS)](
        *(out, x, weight, tiles.order if bias is None else bias, tiles.order, tiles.tiles),
        *(weight.stride(0), of_input, of_output),
        CHOSEN=chosen,
        INPUTS=inputs,
        OUTPUTS=outputs,
        BIASED=bias is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=min(next_power(inputs, _ROWS), _DEPTH * 4 // x.element_size()),
        num_warps=4,
        num_stages=3,
    )
    return out


def _can_group(*stacks: torch.Tensor) -> bool:
    """Return whether the library's product takes these: bfloat16, in rows of whole 16 bytes (8 numbers)."""
    sizes = [size for stack in stacks for size in stack.shape[1:]]
    return all(stack.dtype == torch.bfloat16 for stack in stacks) and all(size % 8 == 0 for size in sizes)


# fmt: off


@kernel
def cut_kernel(order: tl.tensor, tiles: tl.tensor, numbers: tl.tensor, num_pairs: tl.tensor,
               MOST: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
               PAIRS_PAD: tl.constexpr, ROWS: tl.constexpr) -> None:
    """Sort pairs by expert, and cut tiles. One program. ``tiles`` are zeros, with a place for each expert
    behind them.

    The order of an expert's pairs is arbitrary. A row's product does not depend on it.
    """
    pair, expert = tl.arange(0, PAIRS_PAD), tl.arange(0, EXPERTS_PAD)
    known = pair < num_pairs
    # Padding goes to an expert behind the last.
    chosen = tl.load(numbers + pair, mask=known, other=EXPERTS).to(tl.int32)
    counts = tl.histogram(chosen, EXPERTS_PAD)
    counts = tl.where(expert < EXPERTS, counts, 0)
    ends = tl.cumsum(counts, 0)
    begins = ends - counts
    next_places = tiles + 3 * MOST
    tl.store(next_places + expert, begins, mask=expert < EXPERTS)
    tl.debug_barrier()
    place = tl.atomic_add(next_places + chosen, 1, mask=known)
    tl.store(order + place, pair, mask=known)
    of_expert = (counts + ROWS - 1) // ROWS
    tile = tl.cumsum(of_expert, 0) - of_expert
    for number in range(tl.max(of_expert, 0)):
        mine = number < of_expert
        first = begins + number * ROWS
        at = tiles + 3 * (tile + number)
        tl.store(at, expert, mask=mine)
        tl.store(at + 1, first, mask=mine)
        tl.store(at + 2, tl.minimum(first + ROWS, ends), mask=mine)


@kernel
def experts_kernel(out: tl.tensor, x: tl.tensor, weight: tl.tensor, bias: tl.tensor, order: tl.tensor,
                   tiles: tl.tensor, of_expert: tl.tensor, of_input: tl.tensor, of_output: tl.tensor,
                   CHOSEN: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr) -> None:
    """Multiply the rows of one tile by some columns of its expert. Grid (tiles, columns / COLUMNS)."""
    tile = tiles + 3 * tl.program_id(0)
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    if first < end:
        expert = tl.load(tile).to(tl.int64)
        place = first + tl.arange(0, ROWS)
        used = place < end
        pair = tl.load(order + place, mask=used, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        known = column < OUTPUTS
        lane = tl.arange(0, DEPTH)
        rows = x + (pair // CHOSEN)[:, None] * INPUTS + lane[None, :]
        of_lane = lane[:, None] * of_input
        matrix = weight + expert * of_expert + of_lane + column[None, :] * of_output
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, INPUTS, DEPTH):
            inside = lane < INPUTS - start
            row = tl.load(rows + start, mask=used[:, None] & inside[None, :], other=0.0)
            part = tl.load(matrix + start * of_input, mask=inside[:, None] & known[None, :], other=0.0)
            total += tl.dot(row, part, input_precision="ieee")
        if BIASED:
            added = tl.load(bias + expert * OUTPUTS + column, mask=known, other=0.0)
            total += added.to(tl.float32)[None, :]
        tl.store(out + pair[:, None] * OUTPUTS + column[None, :], total.to(out.dtype.element_ty),
                 mask=used[:, None] & known[None, :])
