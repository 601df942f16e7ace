"""The K/V of a CUDA stage: block tables on the host, and a pool on the device for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convoy.errors import PlanError, StepError
from convoy.model.gpu.attention import HeadShape, Pool
from convoy.model.kv import BlockTables, GroupBlocks
from convoy.plan.cache import CacheGroup
from convoy.plan.spec import ModelSpec

MAX_CARRIED_BYTES = 64 * 1024 * 1024  # of K/V that is read or written at once


@dataclass(frozen=True)
class LayerPool:
    """One layer's pool, the cache group whose tables it follows, and what its attention looks like."""

    pool: Pool
    group: int
    shape: HeadShape


class DevicePools:
    """Of layers [start, end). Tables are kept of all groups alike: a step says the same to every stage."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block_size: int,
        require_tags: bool,
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        self.block_bytes = tuple(
            group.block_bytes(layers.start, layers.stop, block_size, name) for group in spec.cache_groups
        )
        self._dtype = dtype
        self.layers: dict[int, LayerPool] = {}
        self._spec = spec
        self._span = layers
        self._device = device
        self._block_size = block_size
        self._require_tags = require_tags
        self._tables: BlockTables | None = None

    @property
    def tables(self) -> BlockTables:
        """Raises StepError where there are no pools."""
        if self._tables is None:
            raise StepError("a step came before the pools were made")
        return self._tables

    @property
    def num_groups(self) -> int:
        return len(self._spec.cache_groups)

    @property
    def shapes(self) -> tuple[HeadShape, ...]:
        """What the attention of each cache group looks like."""
        return tuple(head_shape(group, self._block_size) for group in self._spec.cache_groups)

    def max_blocks(self, num_blocks: Sequence[int]) -> int:
        """Of the tables of one sequence, of all groups together, in pools of so many blocks."""
        most = -(-self._spec.max_context // self._block_size)
        return sum(min(count, most) for count in num_blocks)

    def forget(self) -> None:
        """Free the pools; steps are refused until there are new ones."""
        self.layers, self._tables = {}, None

    def make(self, num_blocks: Sequence[int]) -> None:
        """Forget all sequences; pools of so many blocks for each group. Raises StepError, PlanError."""
        groups = self._spec.cache_groups
        if len(num_blocks) != len(groups):
            raise StepError(f"{len(num_blocks)} counts of blocks came for {len(groups)} cache groups")
        if min(num_blocks) < 1:
            raise StepError(f"pools of {min(num_blocks)} blocks make no sense, expected at least 1")
        self.forget()
        tables = BlockTables(
            [GroupBlocks(count, group.window) for group, count in zip(groups, num_blocks, strict=True)],
            block_size=self._block_size,
            max_context=self._spec.max_context,
            require_tags=self._require_tags,
        )
        try:
            for index, group in enumerate(groups):
                for layer in set(group.layers).intersection(self._span):
                    self.layers[layer] = self._layer_pool(index, num_blocks[index])
        except torch.cuda.OutOfMemoryError as error:
            self.forget()
            sizes = (f"{count} of {size}" for count, size in zip(num_blocks, self.block_bytes, strict=True))
            raise PlanError(
                f"K/V blocks do not fit on {self._device}: {' and '.join(sizes)} bytes",
                hint="lower num_blocks or memory_gb",
            ) from error
        self._tables = tables

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """As `Stage.read_blocks`."""
        self.tables.check_carried(blocks)
        self._check_layers(start, end, f"layers [{start}, {end}) are asked for")
        shape = self.carried_shape(end - start, len(blocks))
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        found = []
        for pool in (self.layers[layer].pool for layer in range(start, end)):
            both = torch.stack((pool.keys.index_select(0, index), pool.values.index_select(0, index)))
            found.append(both.transpose(2, 3).float())
        return torch.stack(found).reshape(shape).to("cpu")

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
        tables.fill(blocks, tags, whole=end == self._span.stop)
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        for layer in range(start, end):
            pool = self.layers[layer].pool
            runs = kv[layer - start].to(self._device, self._dtype).nan_to_num()
            runs = runs.view(2, len(blocks), self._block_size, *expected[3:]).transpose(2, 3)
            pool.keys.index_copy_(0, index, runs[0])
            pool.values.index_copy_(0, index, runs[1])

    def carried_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Of what `read_blocks` gives. Raises StepError for more than MAX_CARRIED_BYTES."""
        group = self._spec.cache_groups[0]
        if not group.is_carried:
            raise StepError("K/V is carried where a block is K and V of one width, and here it is not")
        shape = (num_layers, 2, num_blocks * self._block_size, group.num_kv_heads, group.head_dim)
        if 4 * math.prod(shape) > MAX_CARRIED_BYTES:
            raise StepError(f"{num_blocks} blocks of {num_layers} layers are over {MAX_CARRIED_BYTES} bytes")
        return shape

    def _layer_pool(self, group: int, num_blocks: int) -> LayerPool:
        shape = self.shapes[group]
        return LayerPool(make_pool(num_blocks, shape, self._device, self._dtype), group, shape)

    def _check_layers(self, start: int, end: int, what: str) -> None:
        mine = self._span
        if not mine.start <= start < end <= mine.stop:
            raise StepError(f"{what}, and this stage has [{mine.start}, {mine.stop})")


def head_shape(group: CacheGroup, block_size: int) -> HeadShape:
    """With the usual scale, and no cap: where a layer has others, it says so to `attend`."""
    return HeadShape(
        group.num_heads,
        group.num_kv_heads,
        group.head_dim,
        group.value_dim,
        block_size,
        group.head_dim**-0.5,
        group.window,
    )


def make_pool(num_blocks: int, shape: HeadShape, device: torch.device, dtype: torch.dtype) -> Pool:
    """Zeroed, so that what was never written is a number."""
    size = (num_blocks, shape.num_kv_heads, shape.block_size)
    keys = torch.zeros(*size, shape.head_dim, dtype=dtype, device=device)
    return Pool(keys, torch.zeros(*size, shape.value_dim, dtype=dtype, device=device))
