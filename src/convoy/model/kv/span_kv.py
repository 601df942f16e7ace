"""Define a stage's K/V, independent of the device: tables of every cache group, and checks of carried K/V.

`model.backends.host.stage_kv` keeps its pools on the host, `model.backends.cuda.memory.pools` on a device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from convoy.errors import PlanError, StepError
from convoy.model.kv.pools import BlockTables, GroupBlocks
from convoy.plan.spec.model import ModelSpec

# K/V bytes that one call may read or write
MAX_CARRIED_BYTES = 64 * 1024 * 1024


class KvStore(ABC):
    """Hold the K/V of ``layers``. Tables exist for all cache groups, as every stage receives the same step.

    ``kernel``, or a dtype, decides for groups that name no dtype of K/V. ``failures`` are the exceptions
    raised when the memory ``where`` has no room for the pools.
    """

    failures: tuple[type[Exception], ...] = ()

    def __init__(
        self, spec: ModelSpec, layers: range, kernel: str, where: str, *, block_size: int, require_tags: bool
    ) -> None:
        self.block_bytes = tuple(
            group.block_bytes(layers.start, layers.stop, block_size, kernel) for group in spec.cache_groups
        )
        self._spec = spec
        self._layers = layers
        self._where = where
        self._block_size = block_size
        self._require_tags = require_tags
        self._tables: BlockTables | None = None

    @abstractmethod
    def _make_pools(self, num_blocks: Sequence[int]) -> None:
        """Create zeroed pools, with the given number of blocks for each group that has layers here."""

    @abstractmethod
    def _forget_pools(self) -> None:
        """Free the pools."""

    @property
    def tables(self) -> BlockTables:
        """Return the block tables. Raises StepError if there are no pools."""
        if self._tables is None:
            raise StepError("a step came before the pools were made")
        return self._tables

    def forget(self) -> None:
        """Free the pools; steps are refused until new pools are made."""
        self._tables = None
        self._forget_pools()

    def make(self, num_blocks: Sequence[int]) -> None:
        """Forget all sequences and make pools of so many blocks per group. Raises StepError, PlanError."""
        groups = self._spec.cache_groups
        if len(num_blocks) != len(groups):
            raise StepError(f"{len(num_blocks)} counts of blocks came for {len(groups)} cache groups")
        if min(num_blocks) < 1:
            raise StepError(f"pools of {min(num_blocks)} blocks make no sense, expected at least 1")
        self.forget()
        tables = BlockTables(
            [
                GroupBlocks(count, group.window, group.kind == "recurrent", group.stride)
                for group, count in zip(groups, num_blocks, strict=True)
            ],
            block_size=self._block_size,
            max_context=self._spec.max_context,
            require_tags=self._require_tags,
        )
        try:
            self._make_pools(num_blocks)
        except self.failures as error:
            self.forget()
            sizes = (f"{count} of {size}" for count, size in zip(num_blocks, self.block_bytes, strict=True))
            raise PlanError(
                f"K/V blocks do not fit {self._where}: {' and '.join(sizes)} bytes",
                hint="lower num_blocks or memory_gb",
            ) from error
        self._tables = tables

    # The rest carries blocks of a session. It requires that one block holds all K/V of its positions.

    def carried_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of carried K/V. Raises StepError if it has more than MAX_CARRIED_BYTES."""
        group = self._spec.cache_groups[0]
        if not group.is_carried:
            raise StepError(
                "K/V can be carried only if K and V of a block have one width, and here they do not"
            )
        shape = (num_layers, 2, num_blocks * self._block_size, group.num_kv_heads, group.head_dim)
        if 4 * math.prod(shape) > MAX_CARRIED_BYTES:
            raise StepError(f"{num_blocks} blocks of {num_layers} layers are over {MAX_CARRIED_BYTES} bytes")
        return shape

    def _check_reading(self, start: int, end: int, blocks: Sequence[int]) -> tuple[int, ...]:
        """Check a read of layers [start, end) and return the shape of its result. Raises StepError."""
        self.tables.check_carried(blocks)
        self._check_layers(start, end, f"layers [{start}, {end}) are asked for")
        return self.carried_shape(end - start, len(blocks))

    def _begin_writing(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> int:
        """Check a write and enter its blocks in the tables; return the end of its layers.

        Raises StepError.
        """
        end = start + (kv.shape[0] if kv.dim() else 0)
        tables = self.tables
        self._check_layers(start, end, f"K/V of layers [{start}, {end}) came")
        expected = self.carried_shape(end - start, len(blocks))
        if kv.shape != expected or kv.dtype != torch.float32:
            raise StepError(
                f"K/V came as {kv.dtype} of shape {list(kv.shape)}, expected float32 of {list(expected)}"
            )
        tables.fill(blocks, tags, whole=end == self._layers.stop)
        return end

    def _check_layers(self, start: int, end: int, what: str) -> None:
        mine = self._layers
        if not mine.start <= start < end <= mine.stop:
            raise StepError(f"{what}, and this stage has [{mine.start}, {mine.stop})")
