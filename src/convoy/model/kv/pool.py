"""Hold the pools of a stage: the K and V of each layer, by block.

All numbers in a pool are finite. A masked key gets probability 0, and 0 * inf is NaN, so values that one
broken sequence leaves in a block must not reach the next owner of the block.
"""

from __future__ import annotations

import numpy as np
import torch

from convoy.model.kv.packed import HeadShape


class KvPool:
    """Hold K and V of one layer: [2, num_blocks, kv_heads, block_size, head_dim], float32.

    One head of one block is one contiguous run. A gather of blocks by (block, head) therefore copies whole
    runs into the layout that batched matmuls need. Memory that was never written reads as zero.
    """

    def __init__(self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> None:
        self._runs = _zeros(2 * num_blocks * num_kv_heads, block_size * head_dim)
        self._rows = self._runs.view(-1, head_dim)
        self._head_dim = head_dim
        self._blocks = self._runs.view(2, num_blocks, num_kv_heads, block_size, head_dim)

    @property
    def address(self) -> int:
        """Return the address of the first number."""
        return self._runs.data_ptr()

    @property
    def all_rows(self) -> torch.Tensor:
        """Return the pool as rows [2 * num_blocks * kv_heads * block_size, head_dim]."""
        return self._rows

    def read_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return K/V [2, positions, kv_heads, head_dim] of ``blocks``, int64, in their order."""
        found = self._blocks.index_select(1, blocks).transpose(2, 3)
        return found.reshape(2, -1, *found.shape[3:])

    def write_blocks(self, blocks: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv``, shaped as `read_blocks` returns it, to ``blocks``."""
        runs = kv.view(2, len(blocks), -1, *kv.shape[2:]).transpose(2, 3)
        self._blocks.index_copy_(1, blocks, torch.nan_to_num(runs))

    def write(self, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv`` [N, head_dim] at ``rows`` [N] of [2 * num_blocks * kv_heads * block_size]."""
        self._rows.index_copy_(0, rows, torch.nan_to_num(kv))

    def gather(self, runs: torch.Tensor, run_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather ``runs`` of [2 * num_blocks * kv_heads], K first; return K, V [.., run_rows, head_dim]."""
        found = self._runs.index_select(0, runs).view(2, -1, run_rows, self._head_dim)
        return found[0], found[1]


class ApartPool:
    """Hold K and V of one layer apart, as they differ in width: [num_blocks, kv_heads, block_size, dim] each.

    The numbers are float32. The pool of a latent holds K alone: the first ``value_dim`` numbers of a key are
    its value.
    """

    def __init__(self, shape: HeadShape) -> None:
        num_runs = shape.num_blocks * shape.num_kv_heads
        self._head_dim, self._value_dim = shape.head_dim, shape.out_dim
        self._keys = _zeros(num_runs, shape.block_size * shape.head_dim)
        self._values = None if shape.latent else _zeros(num_runs, shape.block_size * shape.out_dim)

    def write(self, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv`` [N, head_dim + value_dim] at ``rows`` [N] of [num_blocks * kv_heads * block_size]."""
        kv = torch.nan_to_num(kv)
        self._keys.view(-1, self._head_dim).index_copy_(0, rows, kv[:, : self._head_dim])
        if self._values is not None:
            self._values.view(-1, self._value_dim).index_copy_(0, rows, kv[:, self._head_dim :])

    def gather(self, runs: torch.Tensor, run_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather ``runs`` of [num_blocks * kv_heads].

        Returns K [.., run_rows, head_dim] and V [.., run_rows, value_dim].
        """
        keys = self._keys.index_select(0, runs).view(-1, run_rows, self._head_dim)
        if self._values is None:
            return keys, keys[..., : self._value_dim]
        return keys, self._values.index_select(0, runs).view(-1, run_rows, self._value_dim)


class RowPool:
    """Hold rows of one layer that are not keys: [num_rows, width], float32."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._rows = _zeros(num_rows, width)

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` [N, width] at ``rows`` [N]."""
        self._rows.index_copy_(0, rows, torch.nan_to_num(values))

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [.., width] of ``rows`` [..]."""
        return self._rows.index_select(0, rows.reshape(-1)).view(*rows.shape, -1)


def make_pool(shape: HeadShape) -> KvPool | ApartPool:
    """Return a new pool for one layer with heads of ``shape``."""
    if shape.is_joined:
        return KvPool(shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return ApartPool(shape)


def _zeros(num_runs: int, run_elements: int) -> torch.Tensor:
    # NumPy gets zeroed pages that the system maps on first touch; torch would write all zeros at once
    return torch.from_numpy(np.zeros((num_runs, run_elements), dtype=np.float32))
