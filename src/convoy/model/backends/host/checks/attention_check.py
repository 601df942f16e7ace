"""Compare compiled attention with torch's, bit for bit, on this machine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from convoy.model.kernels.native.attention import NativeGroup, fits_native
from convoy.model.kernels.native.library import native_library
from convoy.model.kv.packed import KEY_BLOCK, GroupBatch, HeadShape, describe_group
from convoy.model.kv.pool import KvPool
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.attention import LayerBatch, attend
from convoy.wire.messages.control import Row

# Positions of lone rows: in the first block of keys, on both sides of an edge, and in the third block.
_POSITIONS = (0, KEY_BLOCK - 1, KEY_BLOCK, 2 * KEY_BLOCK + 17)
# The spread of a score, so that softmax shares range from nearly one to nearly none.
_BIG = 6.0


def attention_holds(shape: HeadShape) -> bool:
    """Return whether compiled attention has torch's bits for heads of this shape.

    False without compiled code.
    """
    if native_library() is None or not fits_native(shape):
        return False
    # Two groups of heads show as much as many.
    few = min(shape.num_kv_heads, 2)
    return _holds(
        replace(shape, num_heads=shape.group * few, num_kv_heads=few, num_blocks=_num_blocks(shape))
    )


def _num_blocks(shape: HeadShape) -> int:
    return len(_POSITIONS) * (-(-(_POSITIONS[-1] + 1) // shape.block_size))


@functools.cache
def _holds(shape: HeadShape) -> bool:
    generator = torch.Generator().manual_seed(20)
    per_row = shape.num_blocks // len(_POSITIONS)
    width = shape.num_heads + 2 * shape.num_kv_heads
    with torch.inference_mode():
        heads, cos, sin = (
            torch.randn(len(_POSITIONS), width, shape.head_dim, generator=generator) for _ in range(3)
        )
        cos[:, : shape.num_heads] *= _BIG / shape.head_dim**0.5
        num_rows = shape.num_blocks * shape.block_size * 2 * shape.num_kv_heads
        filled = torch.randn(num_rows, shape.head_dim, generator=generator)
        for rows in ((0, 1, 2, 3), (0,), (3,)):
            # Reversed tables, so that code which ignored the block table would be found out.
            tables = [BlockTable([list(range(row * per_row, (row + 1) * per_row))[::-1]]) for row in rows]
            group = describe_group(
                [(Row(row, _POSITIONS[row], 1, 0), table) for row, table in zip(rows, tables, strict=True)],
                *(0, shape),
            )
            part = [tensor[list(rows)] for tensor in (heads, cos, sin)]
            if not _agree(group, filled, part):
                return False
    return True


def _agree(group: GroupBatch, filled: torch.Tensor, part: Sequence[torch.Tensor]) -> bool:
    shape, (heads, cos, sin) = group.shape, part
    size = (shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pools = [KvPool(*size, shape.kv_dtype) for _ in range(2)]
    for pool in pools:
        pool.write(torch.arange(len(filled)), filled)
    turned = heads * cos + torch.roll(heads, shape.head_dim // 2, -1) * sin
    query, kv = turned[:, : shape.num_heads], turned[:, shape.num_heads :]
    expected = attend(query, kv, LayerBatch(group, pools[0]))
    found = NativeGroup(group).attend(heads, cos, sin, shape.head_dim, pools[1])
    return torch.equal(expected, found) and torch.equal(*(pool.all_rows for pool in pools))
