"""Describe a step of lone rows by compiled code.

Python's part of a step lies between two reads of all weights, so its code and data have left the caches.
Many small calls of NumPy and torch then cost as much as reading a tenth of a 4-bit model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from convoy.model.kernels.native.library import HeadsStruct, LoneRowsStruct, LoneTilesStruct, native_library
from convoy.model.kv.packed import KEY_BLOCK, GroupBatch, HeadShape, TileChunk
from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row

_INT64 = 8


def describe_lone(rows: Sequence[tuple[Row, BlockTable]], group: int, shape: HeadShape) -> GroupBatch | None:
    """Describe rows of one token as `describe_group` does, in one chunk.

    Returns None for other rows, and where nothing is compiled.
    """
    library = native_library()
    if library is None or any(row.num_tokens != 1 for row, _ in rows):
        return None
    positions = [row.start for row, _ in rows]
    tables = [table.blocks[group] for _, table in rows]
    counts = [position // KEY_BLOCK - _first_block(shape, position) + 1 for position in positions]
    count, heads, pairs = len(rows), shape.num_kv_heads, shape.num_kv_heads * sum(counts)
    # Of a row's blocks, the last one may hide keys, and with a window the first one.
    most_masked = count * heads * (1 if shape.window is None else 2)
    halves = 2 if shape.is_joined else 1
    sizes = (count * heads * halves, count * heads, halves * pairs * (KEY_BLOCK // shape.block_size))
    whole = torch.empty(sum(sizes) + 2 * pairs + count * heads, dtype=torch.int64)
    parts = whole.split_with_sizes([*sizes, pairs, pairs, count * heads])
    hidden = torch.empty(most_masked, 1, 1, KEY_BLOCK, dtype=torch.bool)
    numbers = _columns(positions, tables)
    first = ctypes.addressof(numbers)
    num_masked = library.convoy_describe_lone(
        LoneRowsStruct(
            *(first + _INT64 * count * place for place in (0, 3, 1, 2)),
            *(count, shape.num_blocks, heads, shape.block_size, shape.window or 0, int(shape.is_joined)),
        ),
        LoneTilesStruct(*(part.data_ptr() for part in parts), hidden.data_ptr(), pairs),
        most_masked,
    )
    assert num_masked >= 0, "the pairs were counted"
    write_rows, query_rows, kv_runs, pair_tile, bag_pairs, bag_starts = parts
    chunk = TileChunk(
        1, query_rows, kv_runs, hidden[:num_masked], pair_tile, bag_pairs, bag_starts, max(counts)
    )
    return GroupBatch(shape, count, write_rows, (chunk,), None)


def spread(
    cos: torch.Tensor, sin: torch.Tensor, heads: tuple[int, int, int, float]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what `layers.rope.spread_over_heads` does, or None where nothing is compiled.

    ``cos`` and ``sin`` are float32 [1, T, rotary_dim]. ``heads`` is a `layers.rope.HeadSpread`.
    """
    library = native_library()
    if library is None or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return None
    num_heads, num_kv_heads, head_dim, scaling = heads
    cos, sin = cos.contiguous(), sin.contiguous()
    _, num_tokens, rotary_dim = cos.shape
    if rotary_dim > head_dim:
        return None
    made = torch.empty(2, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    wide_cos, wide_sin = made.unbind()
    library.convoy_spread(
        HeadsStruct(num_heads, num_kv_heads, head_dim, rotary_dim, 0, 0),
        *(cos.data_ptr(), sin.data_ptr(), scaling, num_tokens, wide_cos.data_ptr(), wide_sin.data_ptr()),
    )
    return wide_cos, wide_sin


def _first_block(shape: HeadShape, position: int) -> int:
    return 0 if shape.window is None else max(0, position - shape.window + 1) // KEY_BLOCK


def _columns(positions: list[int], tables: list[list[int]]) -> ctypes.Array[ctypes.c_int64]:
    """Return positions, the starts and the sizes of tables, and all tables, one column behind the other."""
    starts, sizes, blocks = [], [], list[int]()
    for table in tables:
        starts.append(len(blocks))
        sizes.append(len(table))
        blocks.extend(table)
    numbers = [*positions, *starts, *sizes, *blocks]
    return (ctypes.c_int64 * len(numbers))(*numbers)
