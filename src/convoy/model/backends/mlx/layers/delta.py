"""Compute the gated delta net of Qwen3.5 over states in MLX's memory.

`model.layers.delta` explains the recurrence and its tiles. Here a chunk's tiles begin where the chunk does,
and decodes of all sequences are one update of their states. So bits depend on the cut into chunks, as
everywhere on MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from convoy.model.backends.mlx.layers.matrices import Linear
from convoy.model.kv.delta_batch import DeltaShape
from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row

# Tokens that are computed together; a power of two.
_TILE = 16
# The library's value.
_L2_EPS = 1e-6


@dataclass
class StatePool:
    """Hold one layer's states, one slot for each sequence, and the inputs that a convolution still covers.

    No other reference to either array is kept: MLX writes in place only then, and copies the pool otherwise.
    """

    # [slots, heads, key_dim, value_dim] in float32, and [slots, taps - 1, mixed_width].
    states: mx.array
    past: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        return [self.states, self.past]

    def copy(self, source: int, target: int) -> None:
        """Copy all that one slot holds to another."""
        self.states[target] = self.states[source]
        self.past[target] = self.past[source]
        mx.eval(self.states, self.past)


@dataclass(frozen=True)
class StateRows:
    """Describe rows of one length: their places in the step [rows, tokens], and their slots."""

    places: mx.array
    slots: mx.array
    # False for rows that begin a sequence; None: none does.
    goes_on: mx.array | None


@dataclass(frozen=True)
class StateBatch:
    """Hold what the layers of a recurrent group need of a step: chunks one by one, decodes together."""

    shape: DeltaShape
    parts: tuple[StateRows, ...]
    # The step's rows in the order of the parts' results, or None where it is the step's own.
    order: mx.array | None


@dataclass(frozen=True)
class DeltaMemory:
    """Hold one layer's states, and the step's rows there."""

    pool: StatePool
    batch: StateBatch


def describe_states(rows: Sequence[tuple[Row, BlockTable]], group: int, shape: DeltaShape) -> StateBatch:
    """Return the parts of checked ``rows``, which follow each other in a step."""
    parts, order, at = [], [], 0
    decodes: list[tuple[int, Row, int]] = []
    for row, table in rows:
        slot = table.blocks[group][0]
        if row.num_tokens == 1:
            decodes.append((at, row, slot))
        else:
            parts.append(_part(np.arange(at, at + row.num_tokens)[None], [slot], [row.start]))
            order.append(np.arange(at, at + row.num_tokens))
        at += row.num_tokens
    if decodes:
        places = np.array([place for place, _, _ in decodes])
        starts = [row.start for _, row, _ in decodes]
        parts.append(_part(places[:, None], [slot for _, _, slot in decodes], starts))
        order.append(places)
    whole = np.concatenate(order)
    back = None if np.array_equal(whole, np.arange(at)) else mx.array(np.argsort(whole))
    return StateBatch(shape, tuple(parts), back)


def _part(places: np.ndarray, slots: Sequence[int], starts: Sequence[int]) -> StateRows:
    goes_on = None if all(starts) else mx.array([start > 0 for start in starts])
    return StateRows(mx.array(places), mx.array(list(slots)), goes_on)


@dataclass(frozen=True)
class DeltaNet:
    """Compute the layer's recurrence, with its linears and its norm."""

    inputs: Linear
    gate: Linear
    share: Linear
    step: Linear
    out: Linear
    # Of shape [taps, mixed_width].
    taps: mx.array
    # Of each head, in float32.
    dt_bias: mx.array
    decay: mx.array
    norm: mx.array
    eps: float

    def __call__(self, x: mx.array, memory: DeltaMemory) -> mx.array:
        """Return the recurrence's result for ``x`` [T, hidden_size]."""
        batch = memory.batch
        mixed, share = self.inputs(x), mx.sigmoid(self.share(x).astype(mx.float32))
        step = self.step(x).astype(mx.float32) + self.dt_bias
        # Logarithms of decays, each at most 0.
        decay = self.decay * mx.logaddexp(step, 0.0)
        found = [
            self._run(part, memory, mixed[part.places], share[part.places], decay[part.places])
            for part in batch.parts
        ]
        whole = found[0] if len(found) == 1 else mx.concatenate(found, axis=0)
        whole = whole if batch.order is None else whole[batch.order]
        normed = mx.fast.rms_norm(whole, self.norm, self.eps).reshape(len(x), -1)
        gate = self.gate(x)
        return self.out(normed.astype(x.dtype) * (gate * mx.sigmoid(gate)))

    def _run(
        self, part: StateRows, memory: DeltaMemory, mixed: mx.array, share: mx.array, decay: mx.array
    ) -> mx.array:
        """Return the results of rows of one length, [tokens of all rows, heads, value_dim] in float32."""
        pool, shape = memory.pool, memory.batch.shape
        past, state = pool.past[part.slots], pool.states[part.slots]
        if part.goes_on is not None:
            # The slot may hold a NaN of its last sequence, which a product with 0 would keep.
            past = mx.where(part.goes_on[:, None, None], past, mx.zeros((), past.dtype))
            state = mx.where(part.goes_on[:, None, None, None], state, 0.0)
        wide = mx.concatenate([past, mixed], axis=1)
        pool.past[part.slots] = wide[:, wide.shape[1] - past.shape[1] :]
        num_rows, num_tokens = part.places.shape
        total = wide[:, :num_tokens] * self.taps[0]
        for tap in range(1, len(self.taps)):
            total = total + wide[:, tap : tap + num_tokens] * self.taps[tap]
        total = (total * mx.sigmoid(total)).astype(mx.float32)
        ends = [shape.key_width, 2 * shape.key_width]
        q, k, v = (
            part.reshape(num_rows, num_tokens, heads, -1)
            for part, heads in zip(
                mx.split(total, ends, axis=-1),
                (shape.num_key_heads, shape.num_key_heads, shape.num_heads),
                strict=True,
            )
        )
        repeat = shape.num_heads // shape.num_key_heads
        q, k = (mx.repeat(_unit(one), repeat, axis=2) for one in (q, k))
        tokens = _Tokens(
            *(
                one.swapaxes(1, 2)
                for one in (q * shape.key_dim**-0.5, k, v, share[..., None], decay[..., None])
            )
        )
        found, state = (_one_token if num_tokens == 1 else _tiles)(tokens, state)
        pool.states[part.slots] = state
        return found.swapaxes(1, 2).reshape(num_rows * num_tokens, shape.num_heads, shape.value_dim)

    @property
    def arrays(self) -> list[mx.array]:
        linears = (self.inputs, self.gate, self.share, self.step, self.out)
        held = [array for linear in linears for array in linear.arrays]
        return [*held, self.taps, self.dt_bias, self.decay, self.norm]


def _unit(x: mx.array) -> mx.array:
    """Return the last dimension at length 1."""
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + _L2_EPS)


class _Tokens(NamedTuple):
    """Hold what the recurrence takes of tokens, each [rows, heads, tokens, width]."""

    q: mx.array
    k: mx.array
    v: mx.array
    share: mx.array
    decay: mx.array


_Scanned = tuple[mx.array, mx.array]


def _one_token(tokens: _Tokens, state: mx.array) -> _Scanned:
    """Run one token of each row; return its result and the new states."""
    q, k, v, share, decay = tokens
    state = state * mx.exp(decay)
    column = k.swapaxes(2, 3)
    known = (state * column).sum(axis=2, keepdims=True)
    state = state + column * ((v - known) * share)
    return (state * q.swapaxes(2, 3)).sum(axis=2, keepdims=True), state


def _tiles(tokens: _Tokens, state: mx.array) -> _Scanned:
    """Run a chunk tile by tile; return [1, heads, tokens, value_dim] and the new state."""
    num_tokens = tokens.q.shape[2]
    num_tiles = -(-num_tokens // _TILE)
    # Tokens without a share, a decay or a key leave a state as it is.
    q, k, v, share, decay = (_tiled(one, num_tiles) for one in tokens)
    sums = mx.cumsum(decay, axis=2)
    places = mx.arange(_TILE)
    seen_by = places[:, None] >= places
    between = mx.exp(mx.where(seen_by, sums - sums.swapaxes(2, 3), -mx.inf))
    keys = k.swapaxes(2, 3)
    seen = (q @ keys) * between
    below = mx.where(places[:, None] > places, (k @ keys) * between * share, 0.0)
    inverse = _inverse(below)
    grown = mx.exp(sums)
    written, reading = inverse @ (v * share), inverse @ (k * grown * share)
    last = sums[:, :, -1:]
    readers, writers, left = q * grown, (k * mx.exp(last - sums)).swapaxes(2, 3), mx.exp(last)
    found, own = [], state[0]
    for tile in range(num_tiles):
        added = written[tile] - reading[tile] @ own
        found.append(readers[tile] @ own + seen[tile] @ added)
        own = own * left[tile] + writers[tile] @ added
    return mx.concatenate(found, axis=1)[None, :, :num_tokens], own[None]


def _tiled(x: mx.array, num_tiles: int) -> mx.array:
    """Return [1, heads, tokens, width] as [tiles, heads, tokens of a tile, width], with zeros at the end."""
    _, heads, num_tokens, width = x.shape
    padded = mx.pad(x[0], [(0, 0), (0, num_tiles * _TILE - num_tokens), (0, 0)])
    return padded.reshape(heads, num_tiles, _TILE, width).swapaxes(0, 1)


def _inverse(below: mx.array) -> mx.array:
    """Return (I + L)^-1 for parts L of [.., _TILE, _TILE] below the diagonal, by blocks of twice the size.

    The inverse of [[A, 0], [B, D]] is [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    """
    lead = below.shape[:-2]
    # The inverses of the blocks on the diagonal, [.., blocks, size, size].
    found = mx.ones((*lead, _TILE, 1, 1))
    size = 1
    while size < _TILE:
        pairs = _TILE // (2 * size)
        grid = below.reshape(*lead, pairs, 2, size, pairs, 2, size)
        # The lower left block of each pair on the diagonal.
        corner = mx.stack([grid[..., pair, 1, :, pair, 0, :] for pair in range(pairs)], axis=-3)
        first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
        left = mx.concatenate([first, -(second @ corner @ first)], axis=-2)
        right = mx.concatenate([mx.zeros(second.shape), second], axis=-2)
        found, size = mx.concatenate([left, right], axis=-1), 2 * size
    return found[..., 0, :, :]
