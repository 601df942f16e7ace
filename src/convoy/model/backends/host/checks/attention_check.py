"""Compare compiled attention with torch's, bit for bit, on this machine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from convoy.model.kernels.native.activation import exp_library
from convoy.model.kernels.native.attention import NativeGroup, fits_native
from convoy.model.kernels.native.library import NativeLibrary
from convoy.model.kv.packed import KEY_BLOCK, GroupBatch, HeadShape, describe_group
from convoy.model.kv.pool import ApartPool, KvPool, make_pool
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.attention import LayerBatch, attend
from convoy.wire.messages.control import Row

# Lone rows in the first block of keys, on both sides of an edge, and in the third block.
_LONE = ((0, 1), (KEY_BLOCK - 1, 1), (KEY_BLOCK, 1), (2 * KEY_BLOCK + 17, 1))
# Batches of rows, each with its start and length. The lengths get tiles of all sizes.
_BATCHES = (_LONE, _LONE[:1], _LONE[3:], ((0, 150), (KEY_BLOCK - 3, 7), (40, 1)), ((KEY_BLOCK + 40, 33),))
_MOST_TOKENS = 150
# The spread of a score, so that softmax shares range from nearly one to nearly none.
_BIG = 6.0


def attention_holds(shape: HeadShape, library: NativeLibrary | None = None) -> bool:
    """Return whether compiled attention has torch's bits for heads of this shape.

    ``library`` is one of `exp_library`, and None means the best one. False without compiled code.
    """
    library = library or exp_library()
    if library is None or not fits_native(shape):
        return False
    # Two groups of heads show as much as many.
    few = min(shape.num_kv_heads, 2)
    num_blocks = len(_LONE) * (-(-_MOST_TOKENS // shape.block_size))
    return _holds(
        replace(shape, num_heads=shape.group * few, num_kv_heads=few, num_blocks=num_blocks), library
    )


@functools.cache
def _holds(shape: HeadShape, library: NativeLibrary) -> bool:
    generator = torch.Generator().manual_seed(20)
    num_rows = shape.num_blocks * shape.block_size * shape.kv_rows[0]
    filled = torch.randn(num_rows, shape.kv_rows[1], generator=generator)
    sinks = torch.randn(shape.num_heads, generator=generator)
    pools = [make_pool(shape) for _ in range(2)]
    per_row = shape.num_blocks // len(_LONE)
    with torch.inference_mode():
        for pool in pools:
            pool.write(torch.arange(num_rows), filled)
        for number, batch in enumerate(_BATCHES):
            # Reversed tables, so that code which ignored the block table would be found out.
            rows = [
                (Row(row, *each, 0), BlockTable([list(range(row * per_row, (row + 1) * per_row))[::-1]]))
                for row, each in enumerate(batch)
            ]
            group = describe_group(rows, 0, shape)
            native = NativeGroup(describe_group(rows, 0, shape, max_chunk_bytes=None), library)
            if not _agree(native, group, pools, generator, sinks if number % 2 else None):
                return False
    return True


def _agree(
    native: NativeGroup,
    group: GroupBatch,
    pools: Sequence[KvPool | ApartPool],
    generator: torch.Generator,
    sinks: torch.Tensor | None,
) -> bool:
    shape, tokens = group.shape, group.num_tokens
    by_torch = LayerBatch(group, pools[0])

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(tokens, *size, generator=generator)

    scale = _BIG / shape.head_dim**0.5
    joined = pools[1]
    if not isinstance(joined, KvPool):
        query, kv = numbers(shape.num_heads, shape.head_dim) * scale, numbers(*shape.kv_rows)
        expected = attend(query, kv, by_torch, sinks=sinks)
        return torch.equal(expected, attend(query, kv, LayerBatch(group, joined, native), sinks=sinks))
    size = (shape.num_heads + shape.kv_rows[0], shape.head_dim)
    heads, cos, sin = (numbers(*size) for _ in range(3))
    cos[:, : shape.num_heads] *= scale
    turned = heads * cos + torch.roll(heads, shape.head_dim // 2, -1) * sin
    query, kv = turned[:, : shape.num_heads], turned[:, shape.num_heads :]
    expected = attend(query, kv, by_torch, sinks=sinks)
    found = native.attend(heads, cos, sin, shape.head_dim, joined, sinks=sinks)
    return torch.equal(expected, found) and torch.equal(
        *(pool.all_rows for pool in pools if isinstance(pool, KvPool))
    )
