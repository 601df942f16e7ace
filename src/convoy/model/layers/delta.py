"""Compute the gated delta net of Qwen3.5, over slots, in place of the library's with its own cache.

A head's state S [keys, values] starts at zero. A token has query q, key k, value v, decay g and share b.
It does S <- e^g S, then S <- S + k (b (v - S^T k))^T, and gives S^T q (Yang et al., "Gated Delta
Networks", 2024, arXiv:2412.06464). A tile of tokens is done in matmuls: the tokens' writes solve a small
triangular system (the UT transform of Yang et al., 2024, arXiv:2406.06484, section 3).

Tiles lie at fixed positions and are always computed whole, with zeros for tokens that have not come yet.
All other operations are element by element or row by row. A row's bits therefore depend on its own
sequence alone, and not on chunks or on the rows beside it. This needs a matmul's bits not to depend on how
many of the same shape run together, which `selfcheck` proves on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from convoy.errors import ModelError
from convoy.model.kernels.activation import activate, exact_sigmoid, exp_, softplus
from convoy.model.kernels.stored.linear import stored_linear
from convoy.model.kernels.stored.weights import Weight, join_rows
from convoy.model.kv.delta_batch import DeltaBatch, DeltaLayer, DeltaPool
from convoy.plan.spec.cache import STATE_TILE

# The library's value.
_L2_EPS = 1e-6


class GatedDeltaNet(nn.Module):
    """Compute the layer with the library's weights, with one linear for all inputs of the recurrence.

    That linear makes queries, keys, values, shares and decays.
    """

    def __init__(self, net: Any, *, packed: bool) -> None:
        super().__init__()
        if net.activation != "silu":
            raise ModelError(f"a delta net with the activation {net.activation!r} is not supported")
        self.layer_idx: int = net.layer_idx
        joined = [net.in_proj_qkv.weight, net.in_proj_b.weight, net.in_proj_a.weight]
        self.inputs = _linear(join_rows(joined), packed=packed)
        self.gate = _linear(net.in_proj_z.weight, packed=packed, activation="silu")
        self.out = _linear(net.out_proj.weight, packed=packed)
        self._packed = packed
        self.eps = float(net.layer_norm_epsilon)
        self.taps = _constant(net.conv1d.weight[:, 0].T)  # [taps, mixed_width]
        self.dt_bias, self.norm = _constant(net.dt_bias), _constant(net.norm.weight)
        self.A_log = _constant(net.A_log)

    def forward(self, hidden_states: torch.Tensor, batch: Mapping[int, DeltaLayer], **_: Any) -> torch.Tensor:
        """Map [1, T, hidden] to the same shape. Padding rows behind the batch's tokens come back as zeros."""
        x, layer = hidden_states[0], batch[self.layer_idx]
        shape, num_tokens = layer.batch.shape, layer.batch.num_tokens
        widths = [shape.mixed_width, shape.num_heads, shape.num_heads]
        mixed, share, step = torch.split(self.inputs(x)[:num_tokens], widths, dim=-1)
        mixed = _convolve(mixed, self.taps, layer)
        # Queries and keys are normalised together, so that there is more than one row.
        turned, value = torch.split(mixed, [2 * shape.key_width, shape.value_width], dim=-1)
        turned = _unit(turned.reshape(num_tokens, -1, shape.key_dim)).view(num_tokens, -1)
        decay = softplus(step + self.dt_bias).mul_(exp_(self.A_log.clone()).neg_())
        tokens = torch.cat((turned, value, exact_sigmoid(share), decay), dim=-1)
        found = _run(tokens, layer)
        found = nn.functional.pad(found, (0, 0, 0, len(x) - num_tokens)).view(len(x), -1, shape.value_dim)
        found = nn.functional.rms_norm(found, found.shape[-1:], self.norm, self.eps)
        gate = self.gate(x) if self._packed else activate(self.gate(x), "silu")
        out: torch.Tensor = self.out(found.view(len(x), -1).mul_(gate))
        return out[None]


def _convolve(mixed: torch.Tensor, taps: torch.Tensor, layer: DeltaLayer) -> torch.Tensor:
    """Return each row behind its past, convolved channel by channel. The past of the next row is stored."""
    batch, pool = layer.batch, layer.pool
    wide = mixed.new_empty(batch.num_wide, mixed.shape[1])
    wide.index_copy_(0, batch.token_wide, mixed)
    wide.index_copy_(0, batch.past_wide, pool.past.index_select(0, batch.past_slots))
    if len(batch.no_past):
        wide.index_fill_(0, batch.no_past, 0.0)
    pool.past.index_copy_(0, batch.past_slots, wide.index_select(0, batch.next_wide))
    num_out = batch.num_wide - len(taps) + 1
    total = wide[:num_out] * taps[0]
    # One tap after the other, so that the order of the sum is fixed.
    for tap in range(1, len(taps)):
        total.add_(wide[tap : tap + num_out] * taps[tap])
    return activate(total.index_select(0, batch.token_wide - (len(taps) - 1)), "silu")


def _run(tokens: torch.Tensor, layer: DeltaLayer) -> torch.Tensor:
    """Run the tokens over the states: [T, ..] to [T, value_width].

    ``tokens`` has the queries, followed by the numbers that each token adds to the state.
    """
    batch, pool = layer.batch, layer.pool
    shape = batch.shape
    tiles = tokens.new_zeros(batch.num_tiles * STATE_TILE, tokens.shape[1])
    tiles.index_copy_(0, batch.token_places, tokens)
    kept = tiles[:, shape.key_width :]
    if len(batch.old_places):
        # A tile that began in an earlier step is computed whole again, from its stored tokens.
        kept.index_copy_(0, batch.old_places, pool.kept.index_select(0, batch.old_slots))
    if len(batch.kept_tokens):
        added = tokens[:, shape.key_width :].index_select(0, batch.kept_tokens)
        pool.kept.index_copy_(0, batch.kept_slots, added)
    found = _scan(_Tiles(tiles, batch), batch, pool).transpose(1, 2)
    return found.reshape(-1, shape.value_width).index_select(0, batch.token_places)


class _Tiles:
    """Compute the parts of all tiles that do not depend on the states. Each is [tiles, heads, ..]."""

    def __init__(self, tiles: torch.Tensor, batch: DeltaBatch) -> None:
        shape = batch.shape
        widths = [shape.key_width, shape.key_width, shape.value_width, shape.num_heads, shape.num_heads]
        query, key, value, share, decay = (
            part.reshape(batch.num_tiles, STATE_TILE, heads, -1).transpose(1, 2)
            for part, heads in zip(
                torch.split(tiles, widths, dim=-1),
                [shape.num_key_heads] * 2 + [shape.num_heads] * 3,
                strict=True,
            )
        )
        # Decays are logarithms: the decay from j + 1 to i is the difference of two sums.
        sums = decay[..., 0].contiguous().cumsum(-1)[..., None]  # [tiles, heads, tokens, 1]
        between = exp_((sums - sums.transpose(-1, -2)).masked_fill_(_LATER, float("-inf")))
        grown, rest = exp_(sums.clone()), exp_(sums[..., -1:, :] - sums)
        products = torch.bmm(
            torch.cat((query, key), dim=2).flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
        ).view(batch.num_tiles, shape.num_key_heads, 2 * STATE_TILE, STATE_TILE)
        repeat = shape.num_heads // shape.num_key_heads
        query, key, products = (part.repeat_interleave(repeat, dim=1) for part in (query, key, products))
        seen, known = torch.split(products.mul_(torch.cat((between, between), dim=2)), STATE_TILE, dim=2)
        inverse = _inverse((known * share).flatten(0, 1), batch.num_filled)
        solved = torch.bmm(inverse, torch.cat((value, key * grown), dim=-1).mul_(share).flatten(0, 1))
        solved = solved.view(batch.num_tiles, shape.num_heads, STATE_TILE, -1)
        self.seen = seen.contiguous()
        self.written, reading = torch.split(solved, [shape.value_dim, shape.key_dim], dim=-1)
        self.readers = torch.cat((query * grown, reading), dim=2)
        self.writers = (key * rest).transpose(2, 3).contiguous()
        self.left = grown[:, :, -1:]


def _scan(tiles: _Tiles, batch: DeltaBatch, pool: DeltaPool) -> torch.Tensor:
    """Run each row's tiles one after the other, all rows at once.

    Returns [tiles, heads, tokens, value_dim].
    """
    # In place: gathering the states of a batch of decodes would cost more than using them.
    states = [pool.states[slot] for slot in batch.slots]
    for state, begins in zip(states, batch.begins, strict=True):
        if begins:
            state.zero_()
    found = torch.empty_like(tiles.written)
    for scan in batch.scans:
        part = slice(scan.first_tile, scan.first_tile + scan.num_rows)
        readers = tiles.readers[part]
        read = readers.new_empty(*readers.shape[:3], batch.shape.value_dim)
        for row in range(scan.num_rows):
            torch.bmm(readers[row], states[row], out=read[row])
        written = tiles.written[part] - read[:, :, STATE_TILE:]
        seen = torch.bmm(tiles.seen[part].flatten(0, 1), written.flatten(0, 1))
        torch.add(seen.view_as(written), read[:, :, :STATE_TILE], out=found[part])
        # Only a whole tile is folded into the state. The tokens of a partial tile are stored and computed
        # again.
        for row in range(scan.num_whole):
            tile = scan.first_tile + row
            states[row].mul_(tiles.left[tile]).add_(torch.bmm(tiles.writers[tile], written[row]))
    return found


def _inverse(below: torch.Tensor, num_filled: int) -> torch.Tensor:
    """Return (I + L)^-1 for the part L of [n, tokens, tokens] below the diagonal, by substitution.

    It works element by element, so that the order of every sum is fixed. Rows from ``num_filled`` on are
    zero.
    """
    inverse = torch.eye(STATE_TILE).expand(below.shape).contiguous()
    for row in range(num_filled - 1):
        part = below[:, row + 1 : num_filled, row : row + 1] * inverse[:, row : row + 1, : row + 1]
        inverse[:, row + 1 : num_filled, : row + 1].sub_(part)
    return inverse


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return [T, heads, dim] at length 1, with queries times dim^-0.5.

    x / sqrt(sum(x^2) + eps) is computed as a norm by the mean.
    """
    size = x.shape[-1]
    normed = nn.functional.rms_norm(x, (size,), None, _L2_EPS / size)
    num_queries = x.shape[1] // 2
    normed[:, :num_queries].mul_(1 / size)
    normed[:, num_queries:].mul_(size**-0.5)
    return normed


def _linear(weight: Weight, *, packed: bool, activation: str | None = None) -> nn.Module:
    """Return a linear over ``weight``. A plain one leaves the activation to the caller."""
    if packed:
        return stored_linear(weight, None, activation)
    assert isinstance(weight, torch.Tensor), "only packed layers take stored matrices"
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = _constant(weight)
    return linear


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


# The keys that a query does not see.
_LATER = torch.ones(STATE_TILE, STATE_TILE, dtype=torch.bool).triu(1)
