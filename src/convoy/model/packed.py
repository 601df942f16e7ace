"""A batch described for attention: which tile of queries meets which block of keys.

Every sequence's positions are cut at fixed places into tiles of queries and blocks of 64 keys, wherever a
chunk begins or ends. So a query always stands at the same place of a tile and meets its keys in the same
order, and all (tile, block) pairs of all sequences and heads go through a few batched matmuls of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from convoy.model.kv import BlockTable
from convoy.wire.messages import Row

KEY_BLOCK = 64  # keys of one matmul; a multiple of the K/V block size
_TILE_ROWS = 16  # query rows of one matmul, several heads of one K/V head included
# (tile, block, head) triples of one matmul: bounds the gathered copies of K and V, and keeps them in a cache
_MAX_PAIRS = 256

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeadShape:
    """What a cache group's attention looks like, and the tiles that follow from it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    window: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile_tokens(self) -> int:
        """Positions of a tile: a power of two, so that no tile straddles a key block."""
        tokens = 1
        while tokens * 2 * self.group <= _TILE_ROWS:
            tokens *= 2
        return tokens

    @property
    def tile_rows(self) -> int:
        """Rows of a tile's matmul, padded to a multiple of 16."""
        return -(-self.tile_tokens * self.group // _TILE_ROWS) * _TILE_ROWS


@dataclass(frozen=True)
class TileChunk:
    """Index tensors for the tiles of some consecutive tokens; pairs go masked ones first, then by head."""

    query_rows: torch.Tensor  # [pairs * kv_heads * tile_tokens] of [T * kv_heads]
    kv_runs: torch.Tensor  # [2 * pairs * kv_heads * KEY_BLOCK / block_size] of [2 * num_blocks * kv_heads]
    hidden: torch.Tensor  # bool [masked pairs, 1, tile_tokens, 1, KEY_BLOCK]: keys a query must not see
    pair_tile: torch.Tensor  # [pairs * kv_heads]: the (tile, head) of each
    tile_pairs: (
        torch.Tensor
    )  # [tiles * kv_heads, most blocks]: each tile's pairs, the first repeated as padding
    bag_pairs: torch.Tensor  # [pairs * kv_heads]: the pairs of each (tile, head), in order of key blocks
    bag_starts: torch.Tensor  # [tiles * kv_heads]
    output_rows: torch.Tensor  # [tokens * kv_heads] of [tiles * kv_heads * tile_tokens]


@dataclass(frozen=True)
class GroupBatch:
    """One step's batch as the attention of one cache group sees it; shared by all its layers."""

    shape: HeadShape
    num_tokens: int
    write_rows: torch.Tensor  # [T * 2 * kv_heads] of [2 * num_blocks * kv_heads * block_size]
    chunks: tuple[TileChunk, ...]


@dataclass(frozen=True)
class _Rows:
    """The rows of a batch, as columns."""

    start: Ints  # position of the first token
    length: Ints
    offset: Ints  # of the first token in the batch
    table: Ints  # where the row's block table begins in the flat tables
    num_blocks: Ints
    tables: Ints  # all block tables, flat


@dataclass(frozen=True)
class _Tiles:
    """All tiles of a batch, as columns."""

    first_token: Ints  # of the batch, may lie before the row's first token
    position: Ints  # of the tile's first slot
    row_start: Ints  # batch index of the row's first and last token
    row_last: Ints
    first_block: Ints  # key blocks [first_block, end_block)
    end_block: Ints
    table: Ints  # where the row's block table begins in the flat tables
    table_last: Ints


def describe_group(rows: Sequence[tuple[Row, BlockTable]], group: int, shape: HeadShape) -> GroupBatch:
    """Describe checked, non-empty ``rows`` for one cache group."""
    columns = _columns(rows, group)
    num_tokens = int(columns.length.sum())
    positions = np.arange(num_tokens) + np.repeat(columns.start - columns.offset, columns.length)
    blocks = columns.tables[np.repeat(columns.table, columns.length) + positions // shape.block_size]
    runs = _both_halves(shape, blocks[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads), axis=1)
    write_rows = runs * shape.block_size + (positions % shape.block_size)[:, None]
    tiles = _cut_tiles(shape, columns)
    chunks = tuple(_chunk(shape, tiles, columns.tables, limits) for limits in _chunk_limits(shape, tiles))
    return GroupBatch(shape, num_tokens, _tensor(write_rows), chunks)


def _columns(rows: Sequence[tuple[Row, BlockTable]], group: int) -> _Rows:
    length = np.array([row.num_tokens for row, _ in rows], dtype=np.int64)
    num_blocks = np.array([len(table.blocks[group]) for _, table in rows], dtype=np.int64)
    return _Rows(
        start=np.array([row.start for row, _ in rows], dtype=np.int64),
        length=length,
        offset=np.cumsum(length) - length,
        table=np.cumsum(num_blocks) - num_blocks,
        num_blocks=num_blocks,
        tables=np.array([block for _, table in rows for block in table.blocks[group]], dtype=np.int64),
    )


def _cut_tiles(shape: HeadShape, rows: _Rows) -> _Tiles:
    step = shape.tile_tokens
    first = rows.start // step
    per_row = (rows.start + rows.length - 1) // step - first + 1
    before = np.cumsum(per_row) - per_row

    def spread(values: Ints) -> Ints:
        return np.repeat(values, per_row)

    position = (np.arange(int(per_row.sum())) + spread(first - before)) * step
    lowest = position - shape.window + 1 if shape.window is not None else np.zeros_like(position)
    return _Tiles(
        first_token=position + spread(rows.offset - rows.start),
        position=position,
        row_start=spread(rows.offset),
        row_last=spread(rows.offset + rows.length - 1),
        first_block=np.maximum(lowest, 0) // KEY_BLOCK,
        end_block=position // KEY_BLOCK + 1,
        table=spread(rows.table),
        table_last=spread(rows.table + rows.num_blocks - 1),
    )


def _chunk_limits(shape: HeadShape, tiles: _Tiles) -> list[tuple[int, int]]:
    """Runs of tiles whose pairs stay within the limit; a tile by itself may exceed it."""
    ends = np.cumsum((tiles.end_block - tiles.first_block) * shape.num_kv_heads)
    limits, start, done = [], 0, 0
    while start < len(ends):
        end = max(start + 1, int(np.searchsorted(ends, done + _MAX_PAIRS, side="right")))
        limits.append((start, end))
        start, done = end, int(ends[end - 1])
    return limits


def _chunk(shape: HeadShape, tiles: _Tiles, tables: Ints, limits: tuple[int, int]) -> TileChunk:
    start, end = limits
    num_kv_heads = shape.num_kv_heads
    heads = np.arange(num_kv_heads)
    num_blocks = tiles.end_block[start:end] - tiles.first_block[start:end]
    pair_starts = np.cumsum(num_blocks) - num_blocks
    pair_tile = np.repeat(np.arange(end - start), num_blocks)
    key_block = np.arange(len(pair_tile)) + np.repeat(tiles.first_block[start:end] - pair_starts, num_blocks)

    query_position = tiles.position[start:end, None] + np.arange(shape.tile_tokens)
    hidden = _hidden_keys(shape, query_position[pair_tile], key_block)
    masked = np.asarray(hidden.any(axis=(1, 2)))
    order, place = _masked_first(masked)
    num_masked = int(masked.sum())
    pair_tile, key_block = pair_tile[order], key_block[order]

    most = int(num_blocks.max())
    columns = np.where(np.arange(most) < num_blocks[:, None], np.arange(most), 0)
    tile_pairs = place[pair_starts[:, None] + columns][:, None, :] * num_kv_heads + heads[:, None]
    bag_counts = np.repeat(num_blocks, num_kv_heads)
    in_bag = np.arange(most) < num_blocks[:, None, None]
    bag_pairs = tile_pairs[np.broadcast_to(in_bag, tile_pairs.shape)]
    return TileChunk(
        query_rows=_tensor(_query_rows(shape, tiles, limits)[pair_tile]),
        kv_runs=_tensor(_kv_runs(shape, tiles, tables, start + pair_tile, key_block)),
        hidden=torch.from_numpy(np.ascontiguousarray(hidden[order[:num_masked]]))[:, None, :, None, :],
        pair_tile=_tensor(pair_tile[:, None] * num_kv_heads + heads),
        tile_pairs=_tensor(tile_pairs).view(-1, most),
        bag_pairs=_tensor(bag_pairs),
        bag_starts=_tensor(np.cumsum(bag_counts) - bag_counts),
        output_rows=_tensor(_output_rows(shape, tiles, start, end)),
    )


def _query_rows(shape: HeadShape, tiles: _Tiles, limits: tuple[int, int]) -> Ints:
    """[tiles, kv_heads, tile_tokens]: where each slot's query stands."""
    part = slice(*limits)
    # slots outside the row are given some token of the row: nobody reads their result
    tokens = np.clip(
        tiles.first_token[part, None] + np.arange(shape.tile_tokens),
        tiles.row_start[part, None],
        tiles.row_last[part, None],
    )
    rows: Ints = tokens[:, None, :] * shape.num_kv_heads + np.arange(shape.num_kv_heads)[:, None]
    return rows


def _kv_runs(shape: HeadShape, tiles: _Tiles, tables: Ints, pair_tile: Ints, key_block: Ints) -> Ints:
    """Where K and V of each (tile, key block) pair stand in a pool; past a table's end, its last block."""
    runs_per_block = KEY_BLOCK // shape.block_size
    entries = tiles.table[pair_tile][:, None] + (
        key_block[:, None] * runs_per_block + np.arange(runs_per_block)
    )
    blocks = tables[np.minimum(entries, tiles.table_last[pair_tile][:, None])]
    heads = np.arange(shape.num_kv_heads)[:, None]
    return _both_halves(shape, blocks[:, None, :] * shape.num_kv_heads + heads, axis=0)


def _hidden_keys(shape: HeadShape, query_position: Ints, key_block: Ints) -> npt.NDArray[np.bool_]:
    keys = (key_block[:, None] * KEY_BLOCK + np.arange(KEY_BLOCK))[:, None, :]
    queries = query_position[:, :, None]
    hidden: npt.NDArray[np.bool_] = keys > queries
    if shape.window is not None:
        hidden |= keys <= queries - shape.window
    return hidden


def _both_halves(shape: HeadShape, key_runs: Ints, axis: int) -> Ints:
    """The runs of K, and the same runs of V, which lies behind all of K in a pool."""
    return np.concatenate([key_runs, key_runs + shape.num_blocks * shape.num_kv_heads], axis=axis)


def _masked_first(masked: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The order that puts masked pairs first, and the place of each pair in it."""
    order = np.argsort(~masked, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return order, place


def _output_rows(shape: HeadShape, tiles: _Tiles, start: int, end: int) -> Ints:
    first = max(int(tiles.first_token[start]), int(tiles.row_start[start]))
    last = min(int(tiles.first_token[end - 1]) + shape.tile_tokens - 1, int(tiles.row_last[end - 1]))
    tokens = np.arange(first, last + 1)
    # the last tile that begins at or before a token; a tile's first real token is never before its row
    begins = np.maximum(tiles.first_token[start:end], tiles.row_start[start:end])
    tile = np.searchsorted(begins, tokens, side="right") - 1
    slot = tokens - tiles.first_token[start:end][tile]
    heads = np.arange(shape.num_kv_heads)
    rows: Ints = (tile[:, None] * shape.num_kv_heads + heads) * shape.tile_tokens + slot[:, None]
    return rows


def _tensor(values: Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
