"""The K/V of a stage: tables and pools of every cache group that has layers here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from convoy.errors import PlanError, StepError
from convoy.model.attention import LayerBatch
from convoy.model.kv import BlockTable, BlockTables, GroupBlocks
from convoy.model.packed import HeadShape, describe_group
from convoy.model.pool import ApartPool, KvPool, make_pool
from convoy.model.selfcheck import least_tile_rows
from convoy.plan.cache import CacheGroup
from convoy.plan.spec import ModelSpec
from convoy.wire.messages import Row

MAX_CARRIED_BYTES = 64 * 1024 * 1024  # of K/V that is read or written at once


class StageKv:
    """Of layers [start, end). Tables are kept of all groups alike: a step says the same to every stage."""

    def __init__(self, spec: ModelSpec, start: int, end: int, *, block_size: int, require_tags: bool) -> None:
        self.block_bytes = tuple(
            group.block_bytes(start, end, block_size, "float32") for group in spec.cache_groups
        )
        self._spec = spec
        self._layers = range(start, end)
        self._block_size = block_size
        self._require_tags = require_tags
        self._least_rows = [_least_rows(group) for group in spec.cache_groups]
        self._shapes: dict[int, HeadShape] = {}  # by group, of those with attention here
        self._tables: BlockTables | None = None
        self._pools: dict[int, KvPool | ApartPool] = {}

    @property
    def tables(self) -> BlockTables:
        """Raises StepError where there are no pools."""
        if self._tables is None:
            raise StepError("a step came before the pools were made")
        return self._tables

    def forget(self) -> None:
        """Free the pools; steps are refused until there are new ones."""
        self._pools, self._tables = {}, None

    def make(self, num_blocks: Sequence[int]) -> None:
        """Forget all sequences; pools of so many blocks for each group. Raises StepError, PlanError."""
        groups = self._spec.cache_groups
        if len(num_blocks) != len(groups):
            raise StepError(f"{len(num_blocks)} counts of blocks came for {len(groups)} cache groups")
        if min(num_blocks) < 1:
            raise StepError(f"pools of {min(num_blocks)} blocks make no sense, expected at least 1")
        self.forget()
        tables = BlockTables(
            [
                GroupBlocks(count, group.window, group.kind == "recurrent")
                for group, count in zip(groups, num_blocks, strict=True)
            ],
            block_size=self._block_size,
            max_context=self._spec.max_context,
            require_tags=self._require_tags,
        )
        try:
            self._make_pools(num_blocks)
        except (RuntimeError, MemoryError, TypeError, ValueError) as error:  # what is raised for too much
            self.forget()
            sizes = (f"{count} of {size}" for count, size in zip(num_blocks, self.block_bytes, strict=True))
            raise PlanError(
                f"K/V blocks do not fit in this machine's memory: {' and '.join(sizes)} bytes",
                hint="lower num_blocks or memory_gb",
            ) from error
        self._tables = tables

    def _make_pools(self, num_blocks: Sequence[int]) -> None:
        self._shapes = {
            index: self._shape(index, num_blocks[index])
            for index, group in enumerate(self._spec.cache_groups)
            if group.kind != "recurrent" and not set(self._layers).isdisjoint(group.layers)
        }
        for index, shape in self._shapes.items():
            for layer in self._spec.cache_groups[index].layers:
                if layer in self._layers:
                    self._pools[layer] = make_pool(shape)

    def describe(self, rows: Sequence[tuple[Row, BlockTable]]) -> dict[int, LayerBatch]:
        """What the attention of each layer needs for checked, non-empty ``rows``."""
        described = {index: describe_group(rows, index, shape) for index, shape in self._shapes.items()}
        return {
            layer: LayerBatch(group, self._pools[layer])
            for index, group in described.items()
            for layer in self._spec.cache_groups[index].layers
            if layer in self._pools
        }

    # Blocks of a session, which are carried only where one block is all there is of some positions.

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """As `Stage.read_blocks`."""
        self.tables.check_carried(blocks)
        self._check_layers(start, end, f"layers [{start}, {end}) are asked for")
        self.carried_shape(end - start, len(blocks))
        index = torch.tensor(blocks, dtype=torch.int64)
        return torch.stack([self._carried_pool(layer).read_blocks(index) for layer in range(start, end)])

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """As `Stage.write_blocks`."""
        end = start + (kv.shape[0] if kv.dim() else 0)
        tables = self.tables
        self._check_layers(start, end, f"K/V of layers [{start}, {end}) came")
        expected = self.carried_shape(end - start, len(blocks))
        if kv.shape != expected or kv.dtype != torch.float32:
            raise StepError(
                f"K/V came as {kv.dtype} of shape {list(kv.shape)}, expected float32 of {list(expected)}"
            )
        tables.fill(blocks, tags, whole=end == self._layers.stop)
        index = torch.tensor(blocks, dtype=torch.int64)
        for layer in range(start, end):
            self._carried_pool(layer).write_blocks(index, kv[layer - start])

    def carried_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Of what `read_blocks` gives. Raises StepError for more than MAX_CARRIED_BYTES."""
        group = self._spec.cache_groups[0]
        if not group.is_carried:
            raise StepError("K/V is carried where a block is K and V of one width, and here it is not")
        shape = (num_layers, 2, num_blocks * self._block_size, group.num_kv_heads, group.head_dim)
        if 4 * math.prod(shape) > MAX_CARRIED_BYTES:
            raise StepError(f"{num_blocks} blocks of {num_layers} layers are over {MAX_CARRIED_BYTES} bytes")
        return shape

    def _carried_pool(self, layer: int) -> KvPool:
        pool = self._pools[layer]
        assert isinstance(pool, KvPool), "`carried_shape` was not asked"
        return pool

    def _check_layers(self, start: int, end: int, what: str) -> None:
        mine = self._layers
        if not mine.start <= start < end <= mine.stop:
            raise StepError(f"{what}, and this stage has [{mine.start}, {mine.stop})")

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
            group.kind == "latent",
        )


def _least_rows(group: CacheGroup) -> int:
    if group.kind == "recurrent":
        return 0
    return max(map(least_tile_rows, {group.head_dim, group.value_dim}))
