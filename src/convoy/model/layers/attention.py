"""Compute attention over packed rows and block pools, of fixed shape, for CPU.

Every (tile, key block) pair has scores = Q K^T, as one batched matmul. The greatest score of a query is
taken over all its blocks, which is exact in any order. After exp, each block gives its sums and P V, which
are added up over a query's blocks in order. This is a softmax with its sums split at fixed places, after
FlashAttention (Dao et al. 2022), with the true maximum instead of a running one. A query's bits therefore
depend on its own keys alone, and not on chunk, batch or threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convoy.model.kernels.activation import exp_, tanh_
from convoy.model.kernels.native.attention import NativeGroup
from convoy.model.kv.packed import KEY_BLOCK, GroupBatch, TileChunk
from convoy.model.kv.pool import ApartPool, KvPool

ATTENTION_NAME = "convoy_packed"


@dataclass(frozen=True)
class LayerBatch:
    """Hold the inputs of one layer's attention in a step."""

    group: GroupBatch
    pool: KvPool | ApartPool
    # The same batch for compiled code.
    native: NativeGroup | None = None

    def attend_latents(self, query: torch.Tensor, kept: torch.Tensor, scaling: float) -> torch.Tensor:
        """Store ``kept`` [T, 1, width], and attend with ``query`` [T, heads, width], not scaled yet."""
        return attend(query * scaling, kept, self)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the library passes it; here the batch says who sees whom
    *,
    scaling: float,
    batch: Mapping[int, LayerBatch],
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write K and V of the step, then attend.

    `loading.load` registers this function in transformers as `ATTENTION_NAME`. ``query`` is [1, heads, T,
    head_dim], ``key`` [1, kv_heads, T, head_dim], ``value`` [1, kv_heads, T, value_dim]; the result is [1,
    T, heads, value_dim]. ``batch`` is keyed by layer index. ``s_aux`` and ``softcap`` are the library's
    names for sinks and cap.
    """
    layer = batch[module.layer_idx]  # type: ignore[index]
    kv = torch.cat((key[0], value[0]), dim=0 if layer.group.shape.is_joined else -1).transpose(0, 1)
    scaled = (query[0] * scaling).transpose(0, 1)
    return attend(scaled, kv, layer, sinks=s_aux, cap=softcap)[None], None


def attend(
    query: torch.Tensor,
    kv: torch.Tensor,
    layer: LayerBatch,
    *,
    sinks: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Attend with scaled queries [T, heads, head_dim], and K then V. Returns [T, heads, value_dim].

    K and V are [T, 2 * kv_heads, head_dim], or [T, kv_heads, head_dim + value_dim] where they differ in
    width, or [T, 1, head_dim] for a latent: see `HeadShape.kv_rows`. T may exceed the batch's tokens by
    padding rows, which are not written and come back as zeros. ``sinks`` holds for each head the score of
    a key that is always present and has no value. ``cap`` bounds the scores through tanh.
    """
    group, shape = layer.group, layer.group.shape
    num_rows, tokens = query.shape[0], group.num_tokens
    layer.pool.write(group.write_rows, kv[:tokens].reshape(-1, shape.kv_rows[1]))
    if layer.native is not None:
        return layer.native.attend_queries(query, layer.pool, sinks, cap)
    rows = query.reshape(-1, shape.group * shape.head_dim)
    outs = [_attend_chunk(rows, layer, chunk, sinks, cap) for chunk in group.chunks]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if group.output_rows is not None:
        out = out.index_select(0, group.output_rows)
    if num_rows > tokens:
        out = nn.functional.pad(out, (0, 0, 0, (num_rows - tokens) * shape.num_kv_heads))
    return out.contiguous().view(num_rows, shape.num_heads, shape.out_dim)


def _attend_chunk(
    rows: torch.Tensor, layer: LayerBatch, chunk: TileChunk, sinks: torch.Tensor | None, cap: float | None
) -> torch.Tensor:
    """Return [tiles * tile_tokens, group * value_dim] for one chunk of tiles."""
    shape = layer.group.shape
    num_pairs, num_tiles = chunk.pair_tile.shape[0], chunk.num_tiles
    used = chunk.tile_tokens * shape.group
    tile_rows = shape.tile_rows(chunk.tile_tokens)
    queries = rows.index_select(0, chunk.query_rows).view(-1, used, shape.head_dim)
    # Every matmul has a fixed number of rows: another number could select another kernel with other bits.
    if used < tile_rows:
        queries = nn.functional.pad(queries, (0, 0, 0, tile_rows - used))
    if num_tiles == 1:
        queries = queries.expand(num_pairs, -1, -1)
    else:
        queries = queries.index_select(0, chunk.pair_tile)
    keys, values = layer.pool.gather(chunk.kv_runs, KEY_BLOCK)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if cap is not None:
        tanh_(scores.div_(cap)).mul_(cap)
    _hide(scores[: chunk.hidden.shape[0], :used], chunk.hidden)
    # A maximum is exact in any order, so it may be taken over blocks and then over a tile's pairs.
    greatest = scores.amax(-1)
    single = chunk.longest == 1
    if not single:
        flat = greatest.index_select(0, chunk.tile_pairs.view(-1))
        greatest = flat.view(*chunk.tile_pairs.shape, -1).amax(1).index_select(0, chunk.pair_tile)
    sink_scores = None if sinks is None else _tile_sinks(sinks, layer, chunk)
    if sink_scores is not None:
        greatest = torch.maximum(greatest, sink_scores.index_select(0, chunk.pair_tile))
    shares = exp_(scores.sub_(greatest.unsqueeze(-1)))
    sums = shares.sum(-1)
    out = torch.bmm(shares, values)
    if not single:
        # Sums are rounded, so blocks are added in the order of their positions.
        sums, out = _add_blocks(sums, chunk), _add_blocks(out.view(num_pairs, -1), chunk)
    elif num_tiles > 1:
        order = chunk.tile_pairs.view(-1)
        sums, out = sums.index_select(0, order), out.index_select(0, order)
    if sink_scores is not None:
        sums = sums + exp_(sink_scores - greatest.index_select(0, chunk.tile_pairs[:, 0]))
    out = out.view(-1, tile_rows, shape.out_dim) / sums.unsqueeze(-1)
    return out[:, :used].reshape(-1, shape.group * shape.out_dim)


def _tile_sinks(sinks: torch.Tensor, layer: LayerBatch, chunk: TileChunk) -> torch.Tensor:
    """Return [tiles, rows of a matmul]: the sink of each row's head. Padded rows get 0."""
    shape = layer.group.shape
    tile_heads = chunk.query_rows.view(-1, chunk.tile_tokens)[:, 0] % shape.num_kv_heads
    of_tile = sinks.view(shape.num_kv_heads, shape.group).index_select(0, tile_heads)
    rows = of_tile.repeat(1, chunk.tile_tokens)
    return nn.functional.pad(rows, (0, shape.tile_rows(chunk.tile_tokens) - rows.shape[1]))


def _hide(scores: torch.Tensor, hidden: torch.Tensor) -> None:
    """Set the scores [pairs, tile_tokens * group, keys] of ``hidden`` keys to -inf."""
    num_pairs, num_tokens, _, num_keys = hidden.shape
    group = scores.shape[1] // num_tokens
    scores.view(num_pairs, num_tokens, group, num_keys).masked_fill_(hidden, float("-inf"))


def _add_blocks(parts: torch.Tensor, chunk: TileChunk) -> torch.Tensor:
    """Add each tile's blocks in order. An embedding bag adds the rows of a bag one after the other."""
    return torch.embedding_bag(parts, chunk.bag_pairs, chunk.bag_starts, False, 0)[0]
