"""Describe a batch for compressed attention: pending numbers, entries that a step closes, and masks.

A layer has its window's keys and its entries in one pool, with the entries' blocks behind the window's.
One softmax covers both: first the window's blocks of keys, then those of entries, in order. A token's
pending numbers stay until its entries are closed. They lie by position in a ring, as a window's keys do. A
step may therefore begin wherever it could with a window alone, and a replay writes the same entries again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from convoy.model.kv.packed import KEY_BLOCK, GroupBatch, HeadShape, TileChunk
from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row

# The memory that the pairs of one call touch, as in `model.kv.packed`.
_MAX_CHUNK_BYTES = 4 << 20

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EntryShape:
    """Describe the geometry of one kind of compressed layers, and name their cache groups."""

    # Keys and entries lie in one pool, with the blocks of both.
    heads: HeadShape
    # The window's blocks in that pool. The entries' blocks follow them.
    window_blocks: int
    # One entry is made for each so many tokens.
    rate: int
    # Tokens that an entry is made of; more than ``rate`` with two series.
    span: int
    groups: tuple[int, int, int]  # window, entries, pending


@dataclass(frozen=True)
class EntryChoice:
    """Hold the entries that the tiles of one chunk may choose from.

    Their pairs are the chunk's first pairs.
    """

    key_runs: torch.Tensor  # [pairs * KEY_BLOCK / block_size] of the pool of second keys
    pair_tile: torch.Tensor  # [pairs]
    pair_block: torch.Tensor  # [pairs]: which block of entries
    # [tiles, most blocks]. The number of pairs marks padding.
    tile_pairs: torch.Tensor
    limits: torch.Tensor  # [tiles, tile_tokens]: entries that are closed for each token
    # The greatest of the limits.
    most: int


@dataclass(frozen=True)
class Closing:
    """Describe the entries that a step closes."""

    sources: torch.Tensor  # [n, span] of the rows of the pending pool
    # bool [n]: the first entry of a sequence. Half of a sparse entry's sources do not exist then.
    is_first: torch.Tensor
    rows: torch.Tensor  # [n] of the rows of the pool of second keys
    pool_rows: torch.Tensor  # [n] of the rows of the pool of keys and entries
    positions: torch.Tensor  # [n]: of the first token that an entry stands for
    # The greatest of the positions.
    last_position: int


@dataclass(frozen=True)
class EntryBatch:
    """Hold one step's batch as compressed layers of one kind need it."""

    group: GroupBatch
    choices: tuple[EntryChoice, ...]  # by chunk of the group
    pending_rows: torch.Tensor  # [T] of the rows of the pending pool
    offsets: torch.Tensor  # [T]: of a token among those of its entry
    closing: Closing | None


@dataclass(frozen=True)
class _Tables:
    """Hold the block tables of one group, flattened."""

    blocks: Ints
    start: Ints  # of each row's
    size: Ints
    block_size: int

    @classmethod
    def of(
        cls, rows: Sequence[tuple[Row, BlockTable]], group: int, block_size: int, first: int = 0
    ) -> _Tables:
        """Return the tables of ``rows``. ``first`` is the place of the group's first block in its pool."""
        tables = [table.blocks[group] for _, table in rows]
        size = np.array([len(table) for table in tables], dtype=np.int64)
        blocks = np.array([block for table in tables for block in table], dtype=np.int64) + first
        return cls(blocks, np.cumsum(size) - size, size, block_size)

    def rows(self, row: Ints, place: Ints) -> Ints:
        """Return the row of ``place`` of each ``row`` in a pool of rows."""
        rows: Ints = self.run(row, place // self.block_size) * self.block_size + place % self.block_size
        return rows

    def run(self, row: Ints, place: Ints) -> Ints:
        """Return the block at index ``place`` of each row's table.

        Past a table's end it continues from the start: the table is a ring, or no query sees these keys.
        """
        blocks: Ints = self.blocks[self.start[row] + place % self.size[row]]
        return blocks


@dataclass(frozen=True)
class _Tiles:
    """Hold tiles of one size, as columns."""

    size: int
    row: Ints  # of the batch
    first: Ints  # token of the batch
    position: Ints  # of the first token
    count: Ints  # of real tokens

    def part(self, chosen: slice) -> _Tiles:
        columns = (self.row, self.first, self.position, self.count)
        return _Tiles(self.size, *(column[chosen] for column in columns))

    @property
    def steps(self) -> Ints:
        """Return [tiles, size]: the tokens of each tile. Slots behind the last token repeat it."""
        return np.minimum(np.arange(self.size), self.count[:, None] - 1)


def describe_entries(rows: Sequence[tuple[Row, BlockTable]], shape: EntryShape) -> EntryBatch:
    """Describe checked, non-empty ``rows`` for layers of ``shape``."""
    window, entries, pending = shape.groups
    start = np.array([row.start for row, _ in rows], dtype=np.int64)
    length = np.array([row.num_tokens for row, _ in rows], dtype=np.int64)
    offset = np.cumsum(length) - length
    row = np.repeat(np.arange(len(rows)), length)
    positions = np.arange(int(length.sum())) + (start - offset)[row]
    size = shape.heads.block_size
    windows = _Tables.of(rows, window, size)
    made = _Tables.of(rows, entries, size, shape.window_blocks)
    kept = _Tables.of(rows, pending, size)

    sizes = shape.heads.tile_tokens(length)
    all_tiles = [_cut(start, length, offset, sizes == one, int(one)) for one in np.unique(sizes)]
    parts = [tiles.part(chosen) for tiles in all_tiles for chosen in _parts(shape, tiles)]
    described = [_chunk(shape, tiles, windows, made) for tiles in parts]
    return EntryBatch(
        group=GroupBatch(
            shape.heads,
            len(positions),
            _tensor(windows.rows(row, positions)),
            tuple(chunk for chunk, _ in described),
            _tensor(_output_rows(parts, len(positions))),
        ),
        choices=tuple(choice for _, choice in described),
        pending_rows=_tensor(kept.rows(row, positions)),
        offsets=_tensor(positions % shape.rate),
        closing=_closing(shape, start, length, made, kept),
    )


def _cut(start: Ints, length: Ints, offset: Ints, chosen: npt.NDArray[np.bool_], size: int) -> _Tiles:
    """Return tiles of ``size`` tokens for the ``chosen`` rows."""
    per_row = -(-length[chosen] // size)
    row = np.repeat(np.flatnonzero(chosen), per_row)
    step = (np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * size
    return _Tiles(size, row, offset[row] + step, start[row] + step, np.minimum(length[row] - step, size))


def _window_blocks(shape: EntryShape, tiles: _Tiles) -> tuple[Ints, Ints]:
    """Return the first block of keys that each tile reads, and the number of blocks."""
    window = shape.heads.window
    assert window is not None, "compressed attention has a window"
    first = np.maximum(tiles.position - window + 1, 0) // KEY_BLOCK
    return first, (tiles.position + tiles.count - 1) // KEY_BLOCK + 1 - first


def _entry_blocks(shape: EntryShape, tiles: _Tiles) -> Ints:
    """Return the number of blocks of entries for each tile's last token."""
    blocks: Ints = -(-((tiles.position + tiles.count) // shape.rate) // KEY_BLOCK)
    return blocks


def _parts(shape: EntryShape, tiles: _Tiles) -> list[slice]:
    """Return runs of tiles with pairs that stay within the limit. A tile by itself may exceed it."""
    max_pairs = _MAX_CHUNK_BYTES // shape.heads.pair_bytes(shape.heads.tile_rows(tiles.size))
    ends = np.cumsum(_window_blocks(shape, tiles)[1] + _entry_blocks(shape, tiles))
    parts, start, done = [], 0, 0
    while start < len(ends):
        end = max(start + 1, int(np.searchsorted(ends, done + max_pairs, side="right")))
        parts.append(slice(start, end))
        start, done = end, int(ends[end - 1])
    return parts


def _chunk(
    shape: EntryShape, tiles: _Tiles, windows: _Tables, entries: _Tables
) -> tuple[TileChunk, EntryChoice]:
    first_block, num_windows = _window_blocks(shape, tiles)
    num_entries = _entry_blocks(shape, tiles)
    num_pairs = num_windows + num_entries
    starts = np.cumsum(num_pairs) - num_pairs
    tile = np.repeat(np.arange(len(num_pairs)), num_pairs)
    # A tile's pairs are its window's key blocks and then its entry blocks, both in order of position.
    place = np.arange(len(tile)) - starts[tile]
    of_entries = place >= num_windows[tile]
    block = np.where(of_entries, place - num_windows[tile], first_block[tile] + place)
    positions = tiles.position[:, None] + tiles.steps
    hidden = _hidden(shape, positions[tile], block, of_entries)

    # Sort entries first, then partly hidden blocks: only these two need a mask, so the mask covers a prefix.
    order = np.argsort(np.where(of_entries, 0, np.where(hidden.any(axis=(1, 2)), 1, 2)), kind="stable")
    back = np.argsort(order)
    num_masked = int((of_entries | hidden.any(axis=(1, 2))).sum())
    tile, block, of_entries = tile[order], block[order], of_entries[order]
    blocks = _pool_blocks(tiles.row[tile], block, of_entries, windows, entries)
    chunk = TileChunk(
        tile_tokens=tiles.size,
        query_rows=_tensor(tiles.first[:, None] + tiles.steps),
        kv_runs=_tensor(blocks),
        hidden=torch.from_numpy(hidden[order[:num_masked]])[:, :, None, :],
        pair_tile=_tensor(tile),
        bag_pairs=_tensor(back),
        bag_starts=_tensor(starts),
        longest=int(num_pairs.max()),
    )
    first = slice(int(of_entries.sum()))
    limits = (positions + 1) // shape.rate
    return chunk, EntryChoice(
        key_runs=_tensor(blocks[first] - shape.window_blocks),
        pair_tile=_tensor(tile[first]),
        pair_block=_tensor(block[first]),
        tile_pairs=_padded(back, starts + num_windows, num_entries, first.stop),
        limits=_tensor(limits).view(limits.shape),
        most=int(limits.max()),
    )


def _hidden(
    shape: EntryShape, query: Ints, block: Ints, of_entries: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return [pairs, tile_tokens, KEY_BLOCK]: the keys hidden from queries at [pairs, tile_tokens]."""
    assert shape.heads.window is not None, "compressed attention has a window"
    keys = (block[:, None] * KEY_BLOCK + np.arange(KEY_BLOCK))[:, None, :]
    query = query[:, :, None]
    outside = (keys > query) | (keys <= query - shape.heads.window)
    found: npt.NDArray[np.bool_] = np.where(
        of_entries[:, None, None], keys >= (query + 1) // shape.rate, outside
    )
    return found


def _pool_blocks(
    row: Ints, block: Ints, of_entries: npt.NDArray[np.bool_], windows: _Tables, entries: _Tables
) -> Ints:
    """Return the pool's blocks of each pair, [pairs, KEY_BLOCK / block_size]."""
    per_block = KEY_BLOCK // windows.block_size
    places = block[:, None] * per_block + np.arange(per_block)
    found = np.empty_like(places)
    for tables, mine in ((windows, ~of_entries), (entries, of_entries)):
        found[mine] = tables.run(row[mine][:, None], places[mine])
    return found


def _padded(pairs: Ints, starts: Ints, counts: Ints, padding: int) -> torch.Tensor:
    """Return [tiles, most]: the pairs from ``starts`` on, then ``padding``."""
    most = max(1, int(counts.max()))
    inside = np.arange(most) < counts[:, None]
    places = np.where(inside, starts[:, None] + np.arange(most), starts[:, None])
    found = pairs[np.minimum(places, len(pairs) - 1)]
    return _tensor(np.where(inside, found, padding)).view(-1, most)


def _closing(
    shape: EntryShape, start: Ints, length: Ints, entries: _Tables, pending: _Tables
) -> Closing | None:
    first = start // shape.rate
    count = (start + length) // shape.rate - first
    row = np.repeat(np.arange(len(start)), count)
    if not len(row):
        return None
    entry = first[row] + np.arange(len(row)) - (np.cumsum(count) - count)[row]
    # An entry's sources end with its own tokens, and begin ``span`` tokens before that end.
    tokens = ((entry + 1) * shape.rate - shape.span)[:, None] + np.arange(shape.span)
    sources = pending.rows(np.repeat(row, shape.span), np.maximum(tokens, 0).reshape(-1))
    pool_rows = entries.rows(row, entry)
    return Closing(
        sources=_tensor(sources).view(-1, shape.span),
        is_first=torch.from_numpy(entry == 0),
        rows=_tensor(pool_rows - shape.window_blocks * entries.block_size),
        pool_rows=_tensor(pool_rows),
        positions=_tensor(entry * shape.rate),
        last_position=int(entry.max()) * shape.rate,
    )


def _output_rows(parts: Sequence[_Tiles], num_tokens: int) -> Ints:
    """Return where each token stands among the tokens of all tiles."""
    rows = np.empty(num_tokens, dtype=np.int64)
    done = 0
    for tiles in parts:
        tokens = (tiles.first[:, None] + tiles.steps).reshape(-1)
        # Assigned backwards, because a tile repeats its last token and the first occurrence is the real one.
        rows[tokens[::-1]] = np.arange(done, done + len(tokens))[::-1]
        done += len(tokens)
    return rows


def with_hidden(group: GroupBatch, hidden: Sequence[torch.Tensor]) -> GroupBatch:
    """Return the same batch with more keys hidden: one mask for each chunk, as `TileChunk.hidden`."""
    chunks = zip(group.chunks, hidden, strict=True)
    return replace(group, chunks=tuple(replace(chunk, hidden=mask) for chunk, mask in chunks))


def _tensor(values: Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
