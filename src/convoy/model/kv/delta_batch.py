"""Hold the state that a recurrent layer keeps of each sequence, and describe a batch for it.

A slot is a block of the "recurrent" cache group, one for each sequence. It holds three things: the inputs
that the next tokens' convolution still covers, the state at the start of the sequence's current tile, and the
additions of that tile's tokens so far. Tiles begin at multiples of `STATE_TILE`, wherever a chunk begins or
ends. A token's sums are therefore always cut at the same places, and their bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from convoy.model.kv.pools import BlockTable
from convoy.plan.spec.cache import STATE_TILE, CacheGroup
from convoy.wire.messages.control import Row

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DeltaShape:
    """Describe the heads of a gated delta net."""

    # value heads, each with a state [key_dim, value_dim]
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    # tokens that the convolution covers, including the current one
    num_taps: int

    @classmethod
    def of(cls, group: CacheGroup) -> DeltaShape:
        """Return the shape of a recurrent cache group."""
        return cls(group.num_heads, group.num_kv_heads, group.head_dim, group.value_dim, group.num_taps)

    @property
    def key_width(self) -> int:
        """Return the width of all heads' keys; queries have the same."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Return the width of all heads' values."""
        return self.num_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """Return the width of the convolution's input: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def kept_width(self) -> int:
        """Return the width of a token's addition to the state: key, value, each head's share and decay."""
        return self.key_width + self.value_width + 2 * self.num_heads


class DeltaPool:
    """Hold the slots of one layer, float32."""

    def __init__(self, shape: DeltaShape, num_slots: int) -> None:
        self.past = _zeros(num_slots * (shape.num_taps - 1), shape.mixed_width)
        self.kept = _zeros(num_slots * STATE_TILE, shape.kept_width)
        self.states = _zeros(num_slots, shape.num_heads, shape.key_dim, shape.value_dim)
        self._num_slots = num_slots

    def copy(self, source: int, target: int) -> None:
        """Copy all that one slot holds to another."""
        for numbers in (self.past, self.kept, self.states):
            slots = numbers.view(self._num_slots, -1)
            slots[target].copy_(slots[source])


@dataclass(frozen=True)
class Scan:
    """Describe the n-th tile of each row that has one; rows that fill it come first."""

    first_tile: int
    num_rows: int
    num_whole: int


@dataclass(frozen=True)
class DeltaBatch:
    """Describe one step's batch for all layers of a recurrent group.

    ``wide`` holds each row's past and then its tokens, row after row. Tiles are in the order of `scans`: the
    first tile of each row, then the second of the rows that have one. Rows with more tiles come first. The
    comments give each index tensor's shape, and the axis that it points into.
    """

    shape: DeltaShape
    num_tokens: int
    num_wide: int
    # [T] into wide
    token_wide: torch.Tensor
    # [rows * (taps - 1)] into wide: the past of each row
    past_wide: torch.Tensor
    # the same rows, into `DeltaPool.past`
    past_slots: torch.Tensor
    # into wide: the past of rows that begin a sequence, which has no inputs and is zero
    no_past: torch.Tensor
    # [rows * (taps - 1)] into wide: the inputs that the sequence's next row needs as its past
    next_wide: torch.Tensor
    num_tiles: int
    # the largest number of tokens in a tile, those of earlier steps included
    num_filled: int
    # [T] into [num_tiles * STATE_TILE]
    token_places: torch.Tensor
    # into the same: places of tokens of earlier steps in the rows' first tiles
    old_places: torch.Tensor
    # the same tokens, into `DeltaPool.kept`
    old_slots: torch.Tensor
    # into [T]: tokens of tiles that are not full yet
    kept_tokens: torch.Tensor
    # the same tokens, into `DeltaPool.kept`
    kept_slots: torch.Tensor
    # the slot of each row, in the order of the scans
    slots: tuple[int, ...]
    # in the same order: whether the row's first tile is the sequence's first
    begins: tuple[bool, ...]
    scans: tuple[Scan, ...]


@dataclass(frozen=True)
class DeltaLayer:
    """Hold the inputs of one layer in a step."""

    batch: DeltaBatch
    pool: DeltaPool


class DeltaSlots:
    """Hold all slots of a stage, for every recurrent group that has layers among ``layers``."""

    def __init__(self, groups: Sequence[CacheGroup], layers: range) -> None:
        self._layers = {
            index: [layer for layer in group.layers if layer in layers]
            for index, group in enumerate(groups)
            if group.is_state and not set(layers).isdisjoint(group.layers)
        }
        self._shapes = {index: DeltaShape.of(groups[index]) for index in self._layers}
        self.pools: dict[int, DeltaPool] = {}

    def make(self, num_blocks: Sequence[int]) -> None:
        """Make new slots, ``num_blocks`` for each cache group."""
        self.pools = {
            layer: DeltaPool(self._shapes[index], num_blocks[index])
            for index, layers in self._layers.items()
            for layer in layers
        }

    def forget(self) -> None:
        """Free the slots."""
        self.pools = {}

    def copy(self, group: int, source: int, target: int) -> None:
        """Copy the state in one slot of a cache group to another slot, for every layer here."""
        for layer in self._layers.get(group, ()):
            self.pools[layer].copy(source, target)

    def describe(self, rows: Sequence[tuple[Row, BlockTable]]) -> dict[int, DeltaLayer]:
        """Return the inputs of each layer with a state, for checked, non-empty ``rows``."""
        found = {}
        for index, layers in self._layers.items():
            batch = describe_delta(rows, index, self._shapes[index])
            found.update({layer: DeltaLayer(batch, self.pools[layer]) for layer in layers})
        return found


@dataclass(frozen=True)
class _Span:
    """Describe a row by its slot, positions and tiles."""

    slot: int
    # the place of the first token in the batch
    offset: int
    start: int
    end: int

    @property
    def first_tile(self) -> int:
        return self.start // STATE_TILE

    @property
    def num_tiles(self) -> int:
        return -(-self.end // STATE_TILE) - self.first_tile

    @property
    def num_whole(self) -> int:
        return self.end // STATE_TILE - self.first_tile


def describe_delta(rows: Sequence[tuple[Row, BlockTable]], group: int, shape: DeltaShape) -> DeltaBatch:
    """Describe checked, non-empty ``rows`` for one recurrent cache group."""
    spans = list(_spans(rows, group))
    # rows with more tiles come first, so the rows of every scan are the first ones of this order
    order = sorted(spans, key=lambda span: (-span.num_tiles, -span.num_whole))
    scans = tuple(_scans(order))
    taps, num_past = shape.num_taps - 1, len(spans) * (shape.num_taps - 1)
    wide = [span.offset + index * taps for index, span in enumerate(spans)]
    ends = [start + taps + span.end - span.start for start, span in zip(wide, spans, strict=True)]
    pairs = list(zip(wide, spans, strict=True))
    places = {span: _places(span, rank, scans) for rank, span in enumerate(order)}
    olds = [(span, span.first_tile * STATE_TILE, span.start) for span in spans]
    parts = [(span, max(span.start, span.end // STATE_TILE * STATE_TILE), span.end) for span in spans]
    return DeltaBatch(
        shape=shape,
        num_tokens=ends[-1] - num_past,
        num_wide=ends[-1],
        token_wide=_join(np.arange(at + taps, end) for at, end in zip(wide, ends, strict=True)),
        past_wide=_join(np.arange(at, at + taps) for at in wide),
        past_slots=_join(np.arange(span.slot * taps, (span.slot + 1) * taps) for span in spans),
        no_past=_join(np.arange(at, at + taps) for at, span in pairs if not span.start),
        next_wide=_join(np.arange(end - taps, end) for end in ends),
        num_tiles=scans[-1].first_tile + scans[-1].num_rows,
        num_filled=max(STATE_TILE if span.num_whole else span.end % STATE_TILE for span in spans),
        token_places=_join(places[span][span.start % STATE_TILE :] for span in spans),
        old_places=_join(places[span][: span.start % STATE_TILE] for span in spans),
        old_slots=_join(_kept_slots(*old) for old in olds),
        kept_tokens=_join(np.arange(start, end) - span.start + span.offset for span, start, end in parts),
        kept_slots=_join(_kept_slots(*part) for part in parts),
        slots=tuple(span.slot for span in order),
        begins=tuple(not span.first_tile for span in order),
        scans=scans,
    )


def _spans(rows: Sequence[tuple[Row, BlockTable]], group: int) -> Iterator[_Span]:
    offset = 0
    for row, table in rows:
        yield _Span(table.blocks[group][0], offset, row.start, row.start + row.num_tokens)
        offset += row.num_tokens


def _scans(order: Sequence[_Span]) -> Iterator[Scan]:
    first = 0
    for tile in range(order[0].num_tiles):
        num_rows = sum(span.num_tiles > tile for span in order)
        yield Scan(first, num_rows, sum(span.num_whole > tile for span in order))
        first += num_rows


def _places(span: _Span, rank: int, scans: Sequence[Scan]) -> Ints:
    """Return the places among all tiles for positions from the row's first tile's start to the row's end."""
    starts = np.array([scan.first_tile + rank for scan in scans[: span.num_tiles]], dtype=np.int64)
    places: Ints = (starts[:, None] * STATE_TILE + np.arange(STATE_TILE)).reshape(-1)
    return places[: span.end - span.first_tile * STATE_TILE]


def _kept_slots(span: _Span, start: int, end: int) -> Ints:
    slots: Ints = span.slot * STATE_TILE + np.arange(start, end) % STATE_TILE
    return slots


def _join(parts: Iterator[Ints]) -> torch.Tensor:
    found = list(parts)
    return _tensor(np.concatenate(found) if found else [])


def _tensor(values: Ints | list[int]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64))


def _zeros(*shape: int) -> torch.Tensor:
    # as in the K/V pools: the system maps zeroed pages on first touch
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))
