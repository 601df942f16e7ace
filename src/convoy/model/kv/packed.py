"""Describe a batch for attention: which tile of queries meets which block of keys.

A tile is some consecutive tokens of one row, for all query heads that share one K/V head. Keys are cut at
fixed places into blocks of 64, wherever a chunk begins or ends, so a query always meets its keys in the same
order. All (tile, block) pairs go through a few batched matmuls, of one shape for tiles of one size. The
number of rows of a matmul, and a query's place among them, must not change the query's bits; `selfcheck`
proves that they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row

# keys of one matmul; a multiple of the K/V block size
KEY_BLOCK = 64
# with fewer rows some machines' matmuls take another code path, see `selfcheck.least_tile_rows`
SAFE_ROWS = 16
# approximate rows of the tile sizes to choose from
_TILE_ROWS = (1, 16, 64, 256)
# the cost of copying a pair's K and V, in rows of its matmuls
_PAIR_ROWS = 40
# bytes that the pairs of one call touch: this bounds the copies, and keeps them in a processor's cache
MAX_CHUNK_BYTES = 4 << 20

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeadShape:
    """Describe the attention of a cache group, and the tiles that follow from it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    window: int | None = None
    # the smallest number of rows in a matmul
    least_rows: int = SAFE_ROWS
    # 0 means the same as ``head_dim``
    value_dim: int = 0
    # True if a value is the first part of its key
    latent: bool = False
    # of the pool, a word of `config.kernels.KV_FORMS`
    kv_dtype: str = "f32"

    @property
    def is_joined(self) -> bool:
        """Tell whether K and V of a layer lie in one pool, V behind all of K."""
        return not self.latent and self.value_dim in (0, self.head_dim)

    @property
    def out_dim(self) -> int:
        """Return the width of a head's result."""
        return self.value_dim or self.head_dim

    @property
    def kv_rows(self) -> tuple[int, int]:
        """Return rows and width of one token's K and V.

        If they are joined, the rows of V follow those of K. Otherwise each value follows its key within a
        row.
        """
        if self.is_joined:
            return 2 * self.num_kv_heads, self.head_dim
        return self.num_kv_heads, self.head_dim + (0 if self.latent else self.out_dim)

    @property
    def group(self) -> int:
        """Return the number of query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    def tile_rows(self, num_tokens: int) -> int:
        """Return the rows of the matmuls for tiles of ``num_tokens``: over 16, a multiple of 16."""
        used, rows = num_tokens * self.group, self.least_rows
        while rows < min(used, SAFE_ROWS):
            rows *= 2
        return rows if used <= rows else -(-used // SAFE_ROWS) * SAFE_ROWS

    def tile_tokens(self, lengths: Ints) -> Ints:
        """Return the cheapest tile size, in tokens, for rows of the given lengths."""
        sizes = np.array(sorted({max(1, rows // self.group) for rows in _TILE_ROWS}))
        costs = np.array([_PAIR_ROWS + self.tile_rows(int(size)) for size in sizes])
        best: Ints = sizes[np.argmin(-(-lengths[:, None] // sizes) * costs, axis=1)]
        return best

    def pair_bytes(self, num_rows: int) -> int:
        """Return the bytes of K, V, queries, scores and results for one (tile, key block) pair."""
        width = self.head_dim + self.out_dim
        return 4 * (KEY_BLOCK * width + num_rows * (KEY_BLOCK + width))


@dataclass(frozen=True)
class TileChunk:
    """Hold index tensors for some consecutive tiles of one size; masked pairs come first.

    If K and V are not joined in one pool, ``kv_runs`` and `GroupBatch.write_rows` have no second half. The
    comments give each tensor's shape, and the axis that it points into.
    """

    tile_tokens: int
    # [tiles * tile_tokens] into [T * kv_heads]
    query_rows: torch.Tensor
    # [2 * pairs * KEY_BLOCK / block_size] into [2 * num_blocks * kv_heads]
    kv_runs: torch.Tensor
    # bool [masked pairs, tile_tokens, 1, KEY_BLOCK]: keys that a query must not see
    hidden: torch.Tensor
    pair_tile: torch.Tensor  # [pairs]
    # [pairs]: the pairs of each tile, in the order of key blocks
    bag_pairs: torch.Tensor
    bag_starts: torch.Tensor  # [tiles]
    # the most pairs of a tile
    longest: int

    @property
    def num_tiles(self) -> int:
        return len(self.bag_starts)

    @cached_property
    def tile_pairs(self) -> torch.Tensor:
        """Return [tiles, longest]: each tile's pairs, with the first pair repeated as padding.

        Only torch's products need it. It is large if one tile of many has a long context.
        """
        starts = self.bag_starts[:, None]
        ends = torch.cat((self.bag_starts[1:], torch.tensor([len(self.bag_pairs)])))[:, None]
        places = starts + torch.arange(self.longest)
        return self.bag_pairs[torch.where(places < ends, places, starts)]


@dataclass(frozen=True)
class GroupBatch:
    """Describe one step's batch for the attention of one cache group; all its layers share it."""

    shape: HeadShape
    num_tokens: int
    # [T * 2 * kv_heads] into [2 * num_blocks * kv_heads * block_size]
    write_rows: torch.Tensor
    chunks: tuple[TileChunk, ...]
    # [T * kv_heads] into all tiles' tokens; None if these are in the batch's order
    output_rows: torch.Tensor | None


@dataclass(frozen=True)
class _Rows:
    """Hold the rows of a batch, as columns."""

    # the position of the first token
    start: Ints
    length: Ints
    # the place of the first token in the batch
    offset: Ints
    # where the row's block table begins in the flat tables
    table: Ints
    num_blocks: Ints


@dataclass(frozen=True)
class _Tiles:
    """Hold all tiles of one size in a batch, as columns."""

    # tokens of each tile, padding included
    num_tokens: int
    # the K/V head
    head: Ints
    # the place of the first token in the batch
    first_token: Ints
    # the place of the last token that is not padding
    last_token: Ints
    # the position of the first token
    position: Ints
    # key blocks [first_block, end_block)
    first_block: Ints
    end_block: Ints
    # where the row's block table begins in the flat tables
    table: Ints
    table_size: Ints

    def tokens(self, part: slice) -> Ints:
        """Return places in the batch [tiles, num_tokens]. Padding repeats a row's last token, and is never
        read.
        """
        tokens: Ints = np.minimum(
            self.first_token[part, None] + np.arange(self.num_tokens), self.last_token[part, None]
        )
        return tokens


def describe_group(
    rows: Sequence[tuple[Row, BlockTable]],
    group: int,
    shape: HeadShape,
    max_chunk_bytes: int | None = MAX_CHUNK_BYTES,
) -> GroupBatch:
    """Describe checked, non-empty ``rows`` for one cache group.

    ``max_chunk_bytes`` bounds the pairs of a chunk. None makes one chunk of all tiles of a size: compiled
    code copies no pairs, and starts its threads once for each chunk.
    """
    columns = _columns(rows, group)
    tables = np.array([block for _, table in rows for block in table.blocks[group]], dtype=np.int64)
    num_tokens = int(columns.length.sum())
    positions = np.arange(num_tokens) + np.repeat(columns.start - columns.offset, columns.length)
    # the remainder makes a table of a windowed group a ring; for others it changes nothing
    entries = positions // shape.block_size % np.repeat(columns.num_blocks, columns.length)
    blocks = tables[np.repeat(columns.table, columns.length) + entries]
    runs = _both_halves(shape, blocks[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads), axis=1)
    write_rows = runs * shape.block_size + (positions % shape.block_size)[:, None]
    sizes = shape.tile_tokens(columns.length)
    all_tiles = [_cut_tiles(shape, columns, sizes == size, int(size)) for size in np.unique(sizes)]
    chunks = [
        _chunk(shape, tiles, tables, part)
        for tiles in all_tiles
        for part in _chunk_parts(shape, tiles, max_chunk_bytes)
    ]
    # with one token a tile, the tiles are already in the batch's order
    ordered = len(all_tiles) == 1 and all_tiles[0].num_tokens == 1
    output_rows = None if ordered else _tensor(_output_rows(shape, all_tiles, num_tokens))
    return GroupBatch(shape, num_tokens, _tensor(write_rows), tuple(chunks), output_rows)


def _columns(rows: Sequence[tuple[Row, BlockTable]], group: int) -> _Rows:
    length = np.array([row.num_tokens for row, _ in rows], dtype=np.int64)
    num_blocks = np.array([len(table.blocks[group]) for _, table in rows], dtype=np.int64)
    return _Rows(
        start=np.array([row.start for row, _ in rows], dtype=np.int64),
        length=length,
        offset=np.cumsum(length) - length,
        table=np.cumsum(num_blocks) - num_blocks,
        num_blocks=num_blocks,
    )


def _cut_tiles(shape: HeadShape, rows: _Rows, chosen: npt.NDArray[np.bool_], num_tokens: int) -> _Tiles:
    """Cut the ``chosen`` rows into tiles of ``num_tokens``, ordered by token, then by head."""
    heads = shape.num_kv_heads
    per_row = -(-rows.length[chosen] // num_tokens)
    before = np.cumsum(per_row) - per_row

    def spread(values: Ints) -> Ints:
        return np.repeat(values[chosen], per_row * heads)

    steps = np.repeat((np.arange(int(per_row.sum())) - np.repeat(before, per_row)) * num_tokens, heads)
    position = spread(rows.start) + steps
    last_position = np.minimum(position + num_tokens, spread(rows.start + rows.length)) - 1
    lowest = position - shape.window + 1 if shape.window is not None else np.zeros_like(position)
    return _Tiles(
        num_tokens=num_tokens,
        head=np.tile(np.arange(heads), int(per_row.sum())),
        first_token=spread(rows.offset) + steps,
        last_token=spread(rows.offset) + steps + last_position - position,
        position=position,
        first_block=np.maximum(lowest, 0) // KEY_BLOCK,
        end_block=last_position // KEY_BLOCK + 1,
        table=spread(rows.table),
        table_size=spread(rows.num_blocks),
    )


def _chunk_parts(shape: HeadShape, tiles: _Tiles, max_chunk_bytes: int | None) -> list[slice]:
    """Return runs of tiles with pairs within the byte limit; a single tile may exceed it."""
    if max_chunk_bytes is None:
        return [slice(0, len(tiles.head))]
    max_pairs = max_chunk_bytes // shape.pair_bytes(shape.tile_rows(tiles.num_tokens))
    ends = np.cumsum(tiles.end_block - tiles.first_block)
    parts, start, done = [], 0, 0
    while start < len(ends):
        end = max(start + 1, int(np.searchsorted(ends, done + max_pairs, side="right")))
        parts.append(slice(start, end))
        start, done = end, int(ends[end - 1])
    return parts


def _chunk(shape: HeadShape, tiles: _Tiles, tables: Ints, part: slice) -> TileChunk:
    num_blocks = tiles.end_block[part] - tiles.first_block[part]
    num_tiles = len(num_blocks)
    pair_starts = np.cumsum(num_blocks) - num_blocks
    pair_tile = np.repeat(np.arange(num_tiles), num_blocks)
    key_block = np.arange(len(pair_tile)) + np.repeat(tiles.first_block[part] - pair_starts, num_blocks)

    tokens = tiles.tokens(part)
    positions = tokens + (tiles.position[part] - tiles.first_token[part])[:, None]
    masked = _has_hidden(shape, positions[pair_tile, 0], positions[pair_tile, -1], key_block)
    order, place = _masked_first(masked)
    num_masked = int(masked.sum())
    pair_tile, key_block = pair_tile[order], key_block[order]
    hidden = _hidden_keys(shape, positions[pair_tile[:num_masked]], key_block[:num_masked])

    return TileChunk(
        tile_tokens=tiles.num_tokens,
        query_rows=_tensor(tokens * shape.num_kv_heads + tiles.head[part, None]),
        kv_runs=_tensor(_kv_runs(shape, tiles, tables, part.start + pair_tile, key_block)),
        hidden=torch.from_numpy(hidden)[:, :, None, :],
        pair_tile=_tensor(pair_tile),
        # Pairs were listed tile by tile before they were ordered.
        bag_pairs=_tensor(place),
        bag_starts=_tensor(pair_starts),
        longest=int(num_blocks.max()),
    )


def _kv_runs(shape: HeadShape, tiles: _Tiles, tables: Ints, pair_tile: Ints, key_block: Ints) -> Ints:
    """Return the places in a pool of K and V for each (tile, key block) pair.

    Past a table's end, places continue at its start. These keys are masked, unless the table is a ring.
    """
    runs_per_block = KEY_BLOCK // shape.block_size
    entries = key_block[:, None] * runs_per_block + np.arange(runs_per_block)
    entries %= tiles.table_size[pair_tile][:, None]
    blocks = tables[tiles.table[pair_tile][:, None] + entries]
    return _both_halves(shape, blocks * shape.num_kv_heads + tiles.head[pair_tile][:, None], axis=0)


def _has_hidden(shape: HeadShape, first: Ints, last: Ints, key_block: Ints) -> npt.NDArray[np.bool_]:
    """Tell whether any query of positions ``first`` to ``last`` must not see some key of the block."""
    masked: npt.NDArray[np.bool_] = key_block * KEY_BLOCK + KEY_BLOCK - 1 > first
    if shape.window is not None:
        masked |= key_block * KEY_BLOCK <= last - shape.window
    return masked


def _hidden_keys(shape: HeadShape, query_position: Ints, key_block: Ints) -> npt.NDArray[np.bool_]:
    keys = (key_block[:, None] * KEY_BLOCK + np.arange(KEY_BLOCK))[:, None, :]
    queries = query_position[:, :, None]
    hidden: npt.NDArray[np.bool_] = keys > queries
    if shape.window is not None:
        hidden |= keys <= queries - shape.window
    return hidden


def _both_halves(shape: HeadShape, key_runs: Ints, axis: int) -> Ints:
    """Return the runs of K followed by those of V, which lies behind all of K in a joined pool."""
    if not shape.is_joined:
        return key_runs
    return np.concatenate([key_runs, key_runs + shape.num_blocks * shape.num_kv_heads], axis=axis)


def _masked_first(masked: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return the order that puts masked pairs first, and the place of each pair in it."""
    order = np.argsort(~masked, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return order, place


def _output_rows(shape: HeadShape, all_tiles: Sequence[_Tiles], num_tokens: int) -> Ints:
    """Return the place of each token of each K/V head among the tokens of all tiles."""
    rows = np.empty(num_tokens * shape.num_kv_heads, dtype=np.int64)
    done = 0
    for tiles in all_tiles:
        tokens = tiles.tokens(slice(None))
        # write backwards: padding repeats a row's last token, and the first, real place must win
        places = np.arange(done, done + tokens.size)[::-1]
        rows[(tokens * shape.num_kv_heads + tiles.head[:, None]).reshape(-1)[::-1]] = places
        done += tokens.size
    return rows


def _tensor(values: Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
