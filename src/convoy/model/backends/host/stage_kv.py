"""Keep the K/V of a stage: tables and pools of every cache group that has layers here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.model.backends.host.checks.attention_check import attention_holds
from convoy.model.backends.host.checks.selfcheck import least_tile_rows
from convoy.model.kernels.native.attention import native_group
from convoy.model.kernels.native.batch import describe_lone
from convoy.model.kv.delta_batch import DeltaLayer, DeltaSlots
from convoy.model.kv.packed import MAX_CHUNK_BYTES, GroupBatch, HeadShape, describe_group
from convoy.model.kv.pool import ApartPool, KvPool, make_pool
from convoy.model.kv.pools import BlockTable, StagedStep
from convoy.model.kv.span_kv import KvStore
from convoy.model.layers.attention import LayerBatch
from convoy.model.layers.compressed.pools import CompressedLayer, CompressedPools
from convoy.model.layers.rope import Rotations
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import Row


class HostKvStore(KvStore):
    """Keep K/V on the host.

    Keys, values and latents have the dtypes of their cache groups. Recurrent states and compressed entries
    are float32.
    """

    # The errors that torch and Python raise for too large an allocation.
    failures = (RuntimeError, MemoryError, TypeError, ValueError)

    def __init__(
        self, spec: ModelSpec, layers: range, kernel: str, *, block_size: int, require_tags: bool
    ) -> None:
        where = "in this machine's memory"
        super().__init__(spec, layers, kernel, where, block_size=block_size, require_tags=require_tags)
        self._least_rows = [_least_rows(group) for group in spec.cache_groups]
        # By cache group, for groups with attention here.
        self._shapes: dict[int, HeadShape] = {}
        self._pools: dict[int, KvPool | ApartPool] = {}
        # The groups for which compiled code computes the attention.
        self._native_groups: list[int] = []
        self._slots = DeltaSlots(spec.cache_groups, layers)
        self._compressed = CompressedPools(spec.cache_groups, layers, block_size)

    def _forget_pools(self) -> None:
        self._pools = {}
        self._slots.forget()
        self._compressed.forget()

    def _make_pools(self, num_blocks: Sequence[int]) -> None:
        # The layers that keep keys and values only.
        alone = set(self._layers) - self._compressed.layers
        self._shapes = {
            index: self._shape(index, num_blocks[index])
            for index, group in enumerate(self._spec.cache_groups)
            if group.attends and not alone.isdisjoint(group.layers)
        }
        self._native_groups = [index for index, shape in self._shapes.items() if attention_holds(shape)]
        for index, shape in self._shapes.items():
            for layer in self._spec.cache_groups[index].layers:
                if layer in alone:
                    self._pools[layer] = make_pool(shape)
        self._slots.make(num_blocks)
        self._compressed.make(num_blocks, self._least_rows)

    def commit(self, staged: StagedStep) -> None:
        """Apply a step that `tables` staged, and copy the states of sequences that get another slot."""
        self.tables.commit(staged)
        for group, source, target in staged.copies:
            self._slots.copy(group, source, target)

    def describe(
        self, rows: Sequence[tuple[Row, BlockTable]], rotations: Rotations
    ) -> dict[int, LayerBatch | DeltaLayer | CompressedLayer]:
        """Return the inputs of each layer's attention or recurrence for checked, non-empty ``rows``."""
        described = {index: self._describe_group(rows, index, shape) for index, shape in self._shapes.items()}
        native = {index: native_group(described[index]) for index in self._native_groups}
        attentions = {
            layer: LayerBatch(group, self._pools[layer], native.get(index))
            for index, group in described.items()
            for layer in self._spec.cache_groups[index].layers
            if layer in self._pools
        }
        return {**attentions, **self._slots.describe(rows), **self._compressed.describe(rows, rotations)}

    def _describe_group(
        self, rows: Sequence[tuple[Row, BlockTable]], index: int, shape: HeadShape
    ) -> GroupBatch:
        if index not in self._native_groups:
            return describe_group(rows, index, shape, MAX_CHUNK_BYTES)
        return describe_lone(rows, index, shape) or describe_group(rows, index, shape, None)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of ``blocks``, as `Stage.read_blocks` does."""
        self._check_reading(start, end, blocks)
        index = torch.tensor(blocks, dtype=torch.int64)
        return torch.stack([self._carried_pool(layer).read_blocks(index) for layer in range(start, end)])

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Fill ``blocks`` with ``kv``, as `Stage.write_blocks` does."""
        end = self._begin_writing(start, blocks, tags, kv)
        index = torch.tensor(blocks, dtype=torch.int64)
        for layer in range(start, end):
            self._carried_pool(layer).write_blocks(index, kv[layer - start])

    def _carried_pool(self, layer: int) -> KvPool:
        pool = self._pools[layer]
        assert isinstance(pool, KvPool), "`carried_shape` was not asked"
        return pool

    def _shape(self, index: int, num_blocks: int) -> HeadShape:
        group = self._spec.cache_groups[index]
        return HeadShape(
            group.num_heads,
            group.num_kv_heads,
            group.head_dim,
            self._block_size,
            num_blocks,
            group.window,
            self._least_rows[index],
            group.value_dim,
            group.is_latent,
            group.host_dtype,
        )


def _least_rows(group: CacheGroup) -> int:
    if not group.attends:
        return 0
    return max(map(least_tile_rows, {group.head_dim, group.value_dim}))
