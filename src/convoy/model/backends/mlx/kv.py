"""Keep the K/V of a stage on MLX: block tables, and two arrays for each layer.

The head grants blocks, and lends full ones to several sequences. So a layer's pool has a place for each
position of each block, and its memory is what the plan counted. The places of a sequence whose blocks follow
each other are read without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import torch

from convoy.model.backends.mlx.arrays import DTYPES, to_mlx, to_torch
from convoy.model.backends.mlx.attention import AttentionBatch, describe_group
from convoy.model.backends.mlx.layer import MlxPool
from convoy.model.kv.pools import BlockTable
from convoy.model.kv.span_kv import KvStore
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import Row


class MlxKvStore(KvStore):
    """Keep K/V in MLX's memory, in the dtype of the activations. Its owner's thread calls it."""

    # MLX raises it for an allocation that is too large, and ValueError for a shape that is.
    failures = (RuntimeError, ValueError, MemoryError)

    def __init__(
        self, spec: ModelSpec, layers: range, dtype: str, *, block_size: int, require_tags: bool
    ) -> None:
        super().__init__(
            spec, layers, dtype, "in MLX's memory", block_size=block_size, require_tags=require_tags
        )
        self._dtype = DTYPES[dtype]
        self._groups = {
            layer: index for index, group in enumerate(spec.cache_groups) for layer in group.layers
        }
        self.pools: dict[int, MlxPool] = {}

    def describe(self, rows: Sequence[tuple[Row, BlockTable]]) -> dict[int, AttentionBatch]:
        """Return the batch of each layer, for checked ``rows``."""
        found = {
            index: describe_group(rows, index, self._block_size, self._spec.cache_groups[index].window)
            for index in {self._groups[layer] for layer in self.pools}
        }
        return {layer: found[self._groups[layer]] for layer in self.pools}

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of ``blocks``, as `Stage.read_blocks` does."""
        shape = self._check_reading(start, end, blocks)
        places = self._places(blocks)
        found = [
            mx.stack([mx.take(pool, places, axis=1).transpose(1, 0, 2) for pool in (own.keys, own.values)])
            for own in (self.pools[layer] for layer in range(start, end))
        ]
        return to_torch(mx.stack(found).astype(mx.float32)).reshape(shape)

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Fill ``blocks`` with ``kv``, as `Stage.write_blocks` does."""
        end = self._begin_writing(start, blocks, tags, kv)
        places = self._places(blocks)
        for layer in range(start, end):
            # Bytes from another member: a NaN would spread through attention to later tokens.
            keys, values = (to_mlx(one.nan_to_num(), self._dtype) for one in kv[layer - start])
            pool = self.pools[layer]
            pool.keys[:, places] = keys.transpose(1, 0, 2)
            pool.values[:, places] = values.transpose(1, 0, 2)
            mx.eval(pool.keys, pool.values)

    def _places(self, blocks: Sequence[int]) -> mx.array:
        starts = np.asarray(blocks, dtype=np.int64)[:, None] * self._block_size
        return mx.array((starts + np.arange(self._block_size)).reshape(-1).astype(np.int32))

    def _make_pools(self, num_blocks: Sequence[int]) -> None:
        for layer in self._layers:
            index = self._groups[layer]
            group = self._spec.cache_groups[index]
            shape = (group.num_kv_heads, num_blocks[index] * self._block_size, group.head_dim)
            # Zeros, so that places never written hold finite numbers.
            pool = MlxPool(mx.zeros(shape, self._dtype), mx.zeros(shape, self._dtype))
            mx.eval(pool.keys, pool.values)
            self.pools[layer] = pool

    def _forget_pools(self) -> None:
        self.pools = {}
        mx.clear_cache()
