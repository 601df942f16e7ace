"""Keep the K/V and the states of a stage on MLX: block tables, and arrays for each layer.

The head grants blocks, and lends full ones to several sequences. So a layer's pool has a place for each
position of each block, and its memory is what the plan counted. The places of a sequence whose blocks follow
each other are read without a copy. A recurrent layer has one slot for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import torch

from convoy.model.backends.mlx.arrays import DTYPES, to_mlx, to_torch
from convoy.model.backends.mlx.layers.attention import AttentionMemory, MlxPool, describe_group
from convoy.model.backends.mlx.layers.delta import DeltaMemory, StatePool, describe_states
from convoy.model.backends.mlx.layers.layer import LayerMemory
from convoy.model.kv.delta_batch import DeltaShape
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
        self._pools: dict[int, MlxPool] = {}
        self._states: dict[int, StatePool] = {}

    def describe(self, rows: Sequence[tuple[Row, BlockTable]]) -> dict[int, LayerMemory]:
        """Return what each layer reads and writes, for checked ``rows``."""
        groups = self._spec.cache_groups
        batches = {
            index: describe_group(rows, index, self._block_size, groups[index].window)
            for index in {self._groups[layer] for layer in self._pools}
        }
        states = {
            index: describe_states(rows, index, DeltaShape.of(groups[index]))
            for index in {self._groups[layer] for layer in self._states}
        }
        return {
            **{n: AttentionMemory(pool, batches[self._groups[n]]) for n, pool in self._pools.items()},
            **{n: DeltaMemory(pool, states[self._groups[n]]) for n, pool in self._states.items()},
        }

    def copy_states(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the states of sequences that get another slot: (cache group, from, to), in order."""
        for group, source, target in copies:
            for layer, pool in self._states.items():
                if self._groups[layer] == group:
                    pool.copy(source, target)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of ``blocks``, as `Stage.read_blocks` does."""
        shape = self._check_reading(start, end, blocks)
        places = self._places(blocks)
        found = [
            mx.stack(
                [mx.take(array, places, axis=1).transpose(1, 0, 2) for array in self._pools[layer].arrays]
            )
            for layer in range(start, end)
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
            pool = self._pools[layer]
            assert pool.values is not None, "`carried_shape` was not asked"
            pool.keys[:, places] = keys.transpose(1, 0, 2)
            pool.values[:, places] = values.transpose(1, 0, 2)
            mx.eval(*pool.arrays)

    def _places(self, blocks: Sequence[int]) -> mx.array:
        starts = np.asarray(blocks, dtype=np.int64)[:, None] * self._block_size
        return mx.array((starts + np.arange(self._block_size)).reshape(-1).astype(np.int32))

    def _make_pools(self, num_blocks: Sequence[int]) -> None:
        # Zeros, so that places never written hold finite numbers.
        for layer in self._layers:
            index = self._groups[layer]
            group, count = self._spec.cache_groups[index], num_blocks[index]
            if group.is_state:
                state = mx.zeros((count, group.num_heads, group.head_dim, group.value_dim))
                past = mx.zeros((count, group.num_taps - 1, DeltaShape.of(group).mixed_width), self._dtype)
                self._states[layer] = StatePool(state, past)
                mx.eval(state, past)
                continue
            shape = (group.num_kv_heads, count * self._block_size)
            keys = mx.zeros((*shape, group.head_dim), self._dtype)
            values = None if group.is_latent else mx.zeros((*shape, group.value_dim), self._dtype)
            self._pools[layer] = MlxPool(keys, values, group.value_dim)
            mx.eval(*self._pools[layer].arrays)

    def _forget_pools(self) -> None:
        self._pools, self._states = {}, {}
        mx.clear_cache()
