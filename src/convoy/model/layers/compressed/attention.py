"""Compute DeepSeek V4's compressed attention, over a window of keys and over entries of several tokens.

This computes the same as the library's modules, with the state in our pools (arXiv: DeepSeek-V4, section
2.3; the library's `modeling_deepseek_v4`). A token's one key is also its value, for all heads. An entry is
the sum of its tokens' numbers, weighted for each element by a softmax of their gates. All sums have a
fixed order, so that under packed linears a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from convoy.model.kernels.activation import exp_
from convoy.model.kernels.linear import pad_rows
from convoy.model.kernels.stored.linear import float_linear, stored_linear
from convoy.model.kv.packed import KEY_BLOCK, SAFE_ROWS, TileChunk
from convoy.model.kv.pool import ApartPool
from convoy.model.layers.attention import LayerBatch, attend
from convoy.model.layers.compressed.batch import Closing, EntryBatch, EntryChoice, with_hidden
from convoy.model.layers.compressed.pools import CompressedLayer
from convoy.model.layers.exact import ExactNorm, RowNorm
from convoy.model.layers.experts import add_columns
from convoy.model.layers.latent import each_head
from convoy.model.layers.rope import Rotation


def own_linear(linear: Any, *, packed: bool) -> nn.Module:
    """Return the library's linear unchanged, or packed."""
    return stored_linear(linear.weight, linear.bias) if packed else linear


def linear_of(weight: torch.Tensor, *, packed: bool) -> nn.Module:
    """Return a linear for a matrix that the library multiplies with directly."""
    if packed:
        return float_linear(weight, None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


class CompressedAttention(nn.Module):
    """Replace the library's compressed attention, with the same weights."""

    def __init__(self, attention: Any, *, packed: bool) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self._scaling = float(attention.scaling)
        self._num_heads: int = attention.num_heads
        self._head_dim: int = attention.head_dim
        self.q_a_proj = own_linear(attention.q_a_proj, packed=packed)
        self.q_a_norm = ExactNorm(attention.q_a_norm)
        self.q_b_proj = own_linear(attention.q_b_proj, packed=packed)
        self.q_b_norm = RowNorm(None, attention.q_b_norm.eps)
        self.kv_proj = own_linear(attention.kv_proj, packed=packed)
        self.kv_norm = ExactNorm(attention.kv_norm)
        # One linear for each group of heads, and one for the results of all groups.
        groups = attention.o_a_proj.n_groups
        apart = attention.o_a_proj.weight.detach().unflatten(0, (groups, -1)).transpose(1, 2)
        self.o_a = nn.Parameter(apart.contiguous(), requires_grad=False)
        self.o_b_proj = own_linear(attention.o_b_proj, packed=packed)
        self.sinks: torch.Tensor = attention.sinks
        made = attention.compressor
        self.compressor = None if made is None else Compressor(made, packed=packed)
        indexer = getattr(made, "indexer", None)
        self.indexer = None if indexer is None else Indexer(indexer, packed=packed)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation,
        batch: Mapping[int, LayerBatch | CompressedLayer],
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend, for hidden states [1, T, hidden]. Returns the same shape, and None."""
        x, (cos, sin) = hidden_states[0], (part[0] for part in position_embeddings)
        reduced = self.q_a_norm(self.q_a_proj(x))
        query = self.q_b_norm(self.q_b_proj(reduced).view(len(x), self._num_heads, self._head_dim))
        query = turn(query, cos, sin)
        kv = turn(self.kv_norm(self.kv_proj(x))[:, None], cos, sin)
        layer = batch[self.layer_idx]
        if isinstance(layer, CompressedLayer):
            layer = self._compress(x, reduced, layer, (cos, sin))
        out = attend(query * self._scaling, kv, layer, sinks=self.sinks)
        # Values were rotated as keys. Rotating back leaves them rotated by their distance alone.
        out = turn(out, cos, -sin)
        grouped = each_head(out.reshape(len(x), len(self.o_a), -1), self.o_a)
        return self.o_b_proj(grouped.reshape(len(x), -1))[None], None

    def _compress(
        self, x: torch.Tensor, reduced: torch.Tensor, layer: CompressedLayer, rotation: Rotation
    ) -> LayerBatch:
        """Store pending numbers, close entries, and return the batch with each token's visible entries."""
        assert self.compressor is not None, "a layer without a compressor has no entries"
        batch, pending = layer.batch, self.compressor.pending(x, layer.batch)
        if self.indexer is not None:
            pending = torch.cat((pending, self.indexer.compressor.pending(x, batch)), dim=-1)
        # Pending numbers are written first: an entry may close over tokens of this very step.
        layer.pending.write(batch.pending_rows, pending[: batch.group.num_tokens])
        if batch.closing is not None and layer.rotation is not None:
            self._close(layer, batch.closing, layer.rotation)
        if self.indexer is None or layer.index is None:
            return LayerBatch(batch.group, layer.pool)
        hidden = self.indexer.choose(x, reduced, layer.index, batch, rotation)
        return LayerBatch(with_hidden(batch.group, hidden), layer.pool)

    def _close(self, layer: CompressedLayer, closing: Closing, rotation: Rotation) -> None:
        assert self.compressor is not None, "a layer without a compressor has no entries"
        sources = layer.pending.read(closing.sources)
        own = sources[..., : self.compressor.width]
        entries = turn(self.compressor.close(own, closing.is_first)[:, None], *rotation)
        layer.pool.write(closing.pool_rows, entries[:, 0])
        if self.indexer is not None and layer.index is not None:
            rest = sources[..., self.compressor.width :]
            keys = turn(self.indexer.compressor.close(rest, closing.is_first)[:, None], *rotation)
            layer.index.write(closing.rows, keys[:, 0])


class Compressor(nn.Module):
    """Make one entry of several tokens: its own, and with two series as many tokens before them."""

    def __init__(self, compressor: Any, *, packed: bool) -> None:
        super().__init__()
        self.kv_proj = own_linear(compressor.kv_proj, packed=packed)
        self.gate_proj = own_linear(compressor.gate_proj, packed=packed)
        self.position_bias: torch.Tensor = compressor.position_bias
        self.kv_norm = ExactNorm(compressor.kv_norm)
        self._dim: int = compressor.head_dim
        self._rate: int = compressor.compress_rate
        # The width of a token's pending numbers and gates.
        self.width = 2 * self.position_bias.shape[1]

    def pending(self, x: torch.Tensor, batch: EntryBatch) -> torch.Tensor:
        """Return [T, width] of [T, hidden]: numbers, then their gates."""
        numbers, gates = self.kv_proj(x), self.gate_proj(x)
        count = batch.group.num_tokens
        gates = gates[:count] + self.position_bias.index_select(0, batch.offsets)
        return torch.cat((numbers[:count], gates), dim=-1)

    def close(self, sources: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
        """Make entries: [n, span, width] to [n, dim].

        A sequence's first entry has no tokens before its own.
        """
        numbers, gates = sources.chunk(2, dim=-1)
        if numbers.shape[-1] > self._dim:
            # The first series comes from the tokens before, the second from the entry's own tokens.
            numbers, gates = (
                torch.cat((part[:, : self._rate, : self._dim], part[:, self._rate :, self._dim :]), dim=1)
                for part in (numbers, gates)
            )
            gates[:, : self._rate].masked_fill_(is_first[:, None, None], float("-inf"))
        shares = exp_(gates - gates.amax(1, keepdim=True))
        entries = _add_in_order(numbers * shares) / _add_in_order(shares)
        normed: torch.Tensor = self.kv_norm(pad_rows(entries))
        return normed[: len(entries)]


class Indexer(nn.Module):
    """Choose the entries that a token sees, by smaller keys that the indexer's own heads rate."""

    def __init__(self, indexer: Any, *, packed: bool) -> None:
        super().__init__()
        self.compressor = Compressor(indexer, packed=packed)
        self.q_b_proj = own_linear(indexer.q_b_proj, packed=packed)
        self.weights_proj = own_linear(indexer.scorer.weights_proj, packed=packed)
        self._num_heads: int = indexer.num_heads
        self._top_k: int = indexer.index_topk
        self._scale = float(indexer.scorer.softmax_scale)
        self._weights_scale = float(indexer.scorer.weights_scaling)

    def choose(
        self, x: torch.Tensor, reduced: torch.Tensor, pool: ApartPool, batch: EntryBatch, rotation: Rotation
    ) -> list[torch.Tensor]:
        """Return the hidden keys of each chunk, as `TileChunk.hidden`, also hiding entries not chosen."""
        if all(choice.most <= self._top_k for choice in batch.choices):
            # With so few closed entries, every one of them is chosen.
            return [chunk.hidden for chunk in batch.group.chunks]
        query = turn(self.q_b_proj(reduced).view(len(x), self._num_heads, -1), *rotation)
        weights = self.weights_proj(x) * self._weights_scale
        return [
            self._hide(query, weights, pool, chunk, choice)
            for chunk, choice in zip(batch.group.chunks, batch.choices, strict=True)
        ]

    def _hide(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        pool: ApartPool,
        chunk: TileChunk,
        choice: EntryChoice,
    ) -> torch.Tensor:
        num_pairs = len(choice.pair_tile)
        if choice.most <= self._top_k or not num_pairs:
            return chunk.hidden
        rated = self._rate(query, weights, pool, chunk, choice)
        # [tiles, blocks, tokens, keys]. A row of -inf behind all pairs stands for padding in ``tile_pairs``.
        nothing = rated.new_full((1, *rated.shape[1:]), float("-inf"))
        of_tile = torch.cat((rated, nothing)).index_select(0, choice.tile_pairs.view(-1))
        scores = of_tile.view(*choice.tile_pairs.shape, *rated.shape[1:]).transpose(1, 2).flatten(2)
        keys = torch.arange(scores.shape[-1])
        scores = scores.masked_fill(keys >= choice.limits[..., None], float("-inf"))
        chosen = _greatest(scores, self._top_k).view(*scores.shape[:2], -1, KEY_BLOCK)
        left_out = ~chosen[choice.pair_tile, :, choice.pair_block]
        hidden = chunk.hidden.clone()
        hidden[:num_pairs, :, 0] |= left_out
        return hidden

    def _rate(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        pool: ApartPool,
        chunk: TileChunk,
        choice: EntryChoice,
    ) -> torch.Tensor:
        """Return [pairs, tile_tokens, KEY_BLOCK]: each key's weighted sum of the heads' positive scores."""
        used = chunk.tile_tokens * self._num_heads
        tiles = query.index_select(0, chunk.query_rows).view(-1, used, query.shape[-1])
        tiles = nn.functional.pad(tiles, (0, 0, 0, -used % SAFE_ROWS)).index_select(0, choice.pair_tile)
        keys, _ = pool.gather(choice.key_runs, KEY_BLOCK)
        scores = torch.bmm(tiles, keys.transpose(1, 2))[:, :used].relu_().mul_(self._scale)
        of_heads = weights.index_select(0, chunk.query_rows).view(-1, chunk.tile_tokens, self._num_heads, 1)
        scores = scores.view(len(scores), -1, self._num_heads, KEY_BLOCK)
        return add_columns((scores * of_heads.index_select(0, choice.pair_tile)).transpose(1, 2))


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return [T, heads, dim] with the pairs at its end rotated by [T, pairs]."""
    fixed, turning = torch.split(x, [x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    even, odd, cos, sin = turning[..., 0::2], turning[..., 1::2], cos[:, None], sin[:, None]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((fixed, turned.flatten(-2)), dim=-1)


def _add_in_order(x: torch.Tensor) -> torch.Tensor:
    """Return [n, rows, dim] added over the rows, one after the other, as an embedding bag adds them."""
    num, rows, dim = x.shape
    starts = torch.arange(0, num * rows, rows)
    return torch.embedding_bag(x.reshape(-1, dim), torch.arange(num * rows), starts, False, 0)[0]


def _greatest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return a mask of the ``count`` greatest of the last dimension. Of equal ones the first count."""
    least = torch.topk(scores, min(count, scores.shape[-1]), dim=-1)[0][..., -1:]
    above, equal = scores > least, scores == least
    # Ties are resolved by place, because the choice of `topk` among equal scores is not defined.
    left = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= left))
