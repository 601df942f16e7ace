"""Keep the K/V of a CUDA stage: block tables on the host, and a pool on the device for each layer.

Keys, values and latents have the stage's dtype. Recurrent states are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convoy.model.backends.cuda.kernels.attention import DeviceHeadShape, Pool
from convoy.model.backends.cuda.layers.delta import DeviceStatePool
from convoy.model.backends.cuda.layers.latent import num_parts
from convoy.model.kv.delta_batch import DeltaShape
from convoy.model.kv.pools import StagedStep
from convoy.model.kv.span_kv import KvStore
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.model import ModelSpec


@dataclass(frozen=True)
class LayerPool:
    """Hold one layer's pool, the cache group with its block tables, and the shape of its attention."""

    held: Pool | DeviceStatePool
    group: int
    shape: DeviceHeadShape

    @property
    def pool(self) -> Pool:
        """Return the keys and values of a layer with attention."""
        assert isinstance(self.held, Pool), "this layer keeps a state"
        return self.held

    @property
    def states(self) -> DeviceStatePool:
        """Return the slots of a recurrent layer."""
        assert isinstance(self.held, DeviceStatePool), "this layer keeps keys"
        return self.held


class DevicePools(KvStore):
    """Keep K/V on a device, in the stage's dtype."""

    failures = (torch.cuda.OutOfMemoryError,)

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
        name, where = str(dtype).removeprefix("torch."), f"on {device}"
        super().__init__(spec, layers, name, where, block_size=block_size, require_tags=require_tags)
        self._dtype = dtype
        self._device = device
        self.layers: dict[int, LayerPool] = {}

    @property
    def num_groups(self) -> int:
        return len(self._spec.cache_groups)

    @property
    def shapes(self) -> tuple[DeviceHeadShape, ...]:
        """Return the head shape of each cache group."""
        return tuple(head_shape(group, self._block_size) for group in self._spec.cache_groups)

    def max_blocks(self, num_blocks: Sequence[int]) -> int:
        """Return the most blocks of one sequence over all groups, in pools of ``num_blocks`` blocks."""
        most = -(-self._spec.max_context // self._block_size)
        return sum(min(count, most) for count in num_blocks)

    def _forget_pools(self) -> None:
        self.layers = {}

    def _make_pools(self, num_blocks: Sequence[int]) -> None:
        for index, group in enumerate(self._spec.cache_groups):
            for layer in set(group.layers).intersection(self._layers):
                shape = self.shapes[index]
                held = self._make_pool(group, num_blocks[index], shape)
                self.layers[layer] = LayerPool(held, index, shape)

    def _make_pool(
        self, group: CacheGroup, num_blocks: int, shape: DeviceHeadShape
    ) -> Pool | DeviceStatePool:
        if group.is_state:
            return DeviceStatePool(DeltaShape.of(group), num_blocks, self._device)
        if group.is_latent:
            size = (num_blocks, 1, self._block_size, group.head_dim)
            latents = torch.zeros(*size, dtype=self._dtype, device=self._device)
            # The values are a part of the same rows.
            return Pool(latents, latents[..., : group.value_dim])
        return make_pool(num_blocks, shape, self._device, self._dtype)

    def commit(self, staged: StagedStep) -> None:
        """Apply a step that `tables` staged, and copy the states of sequences that get another slot."""
        self.tables.commit(staged)
        for group, source, target in staged.copies:
            for layer in self.layers.values():
                if layer.group == group:
                    layer.states.copy(source, target)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of ``blocks``, as `Stage.read_blocks` does."""
        shape = self._check_reading(start, end, blocks)
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        found = []
        for pool in (self.layers[layer].pool for layer in range(start, end)):
            both = torch.stack((pool.keys.index_select(0, index), pool.values.index_select(0, index)))
            # The pool keeps heads before positions, and the carried form has positions before heads.
            found.append(both.transpose(2, 3).float())
        return torch.stack(found).reshape(shape).to("cpu")

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Fill ``blocks`` with ``kv``, as `Stage.write_blocks` does."""
        end = self._begin_writing(start, blocks, tags, kv)
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        for layer in range(start, end):
            pool = self.layers[layer].pool
            # Bytes from another member: a NaN would spread through attention to later tokens.
            runs = kv[layer - start].to(self._device, self._dtype).nan_to_num()
            runs = runs.view(2, len(blocks), self._block_size, *kv.shape[3:]).transpose(2, 3)
            pool.keys.index_copy_(0, index, runs[0])
            pool.values.index_copy_(0, index, runs[1])


class CarriesKv:
    """Read and write the K/V of a stage."""

    _kv: DevicePools

    @torch.inference_mode()
    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of ``blocks`` in layers [start, end).

        The result is float32 [layers, 2, positions, kv_heads, head_dim]. Raises StepError for layers or
        blocks that this stage does not have, and above `span_kv.MAX_CARRIED_BYTES`.
        """
        return self._kv.read_blocks(start, end, blocks)

    @torch.inference_mode()
    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Fill ``blocks``, which no sequence holds, in layers from ``start`` on.

        ``kv`` is as from `read_blocks`. The blocks hold the prefixes of ``tags`` once the stage's last
        layer is filled, and no prefix before. Layers must therefore come in order. Raises StepError;
        nothing is changed then.
        """
        self._kv.write_blocks(start, blocks, tags, kv)

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of a `read_blocks` result. Raises StepError above `span_kv.MAX_CARRIED_BYTES`."""
        return self._kv.carried_shape(num_layers, num_blocks)


def head_shape(group: CacheGroup, block_size: int) -> DeviceHeadShape:
    """Return the shape of a cache group's attention, with the usual scale and no cap.

    A layer with another scale or a cap passes it to `attend`. For latents the K/V heads are parts of the
    query heads, which all meet the same rows.
    """
    return DeviceHeadShape(
        group.num_heads,
        num_parts(group.num_heads) if group.is_latent else group.num_kv_heads,
        group.head_dim,
        group.value_dim,
        block_size,
        group.head_dim**-0.5,
        group.window,
    )


def make_pool(num_blocks: int, shape: DeviceHeadShape, device: torch.device, dtype: torch.dtype) -> Pool:
    """Return a zeroed pool, so that slots never written hold finite numbers."""
    size = (num_blocks, shape.num_kv_heads, shape.block_size)
    keys = torch.zeros(*size, shape.head_dim, dtype=dtype, device=device)
    return Pool(keys, torch.zeros(*size, shape.value_dim, dtype=dtype, device=device))
