"""Hold the pools of a stage: the K and V of each layer, by block, in one of the dtypes of K/V.

A value is rounded once, when it is written, by itself or with the other values of its group. Reading widens
it to float32, which is exact. So a query reads the same numbers in any batch, chunk, cut or replay, under
every dtype. Rounding a value that was read from a pool changes nothing: carried K/V keep their bits.

All numbers in a pool are finite. A masked key gets probability 0, and 0 * inf is NaN, so values that one
broken sequence leaves in a block must not reach the next owner of the block.
"""

from __future__ import annotations

import numpy as np
import torch

from convoy.config.kernels import KV_FORMS
from convoy.model.kv.packed import HeadShape

# Torch's dtypes of K/V without scales.
_PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Types of the same size that NumPy has too.
_CELLS = {"f32": np.float32, "bf16": np.int16, "f16": np.float16}
_GREATEST_CODE = 127
# Scales are normal numbers of float16: with 11 bits each, a code times a scale and its quotient are exact.
_SCALES = 2.0**-14, torch.finfo(torch.float16).max


class _PlainRuns:
    """Hold runs of ``run_rows`` rows, each [width], as numbers of one type."""

    def __init__(self, num_runs: int, run_rows: int, width: int, kv_dtype: str) -> None:
        self._dtype = _PLAIN[kv_dtype]
        # NumPy gets zeroed pages that the system maps on first touch; torch would write all zeros at once
        cells = torch.from_numpy(np.zeros((num_runs, run_rows * width), dtype=_CELLS[kv_dtype]))
        self._runs = cells.view(self._dtype)
        self._rows = self._runs.view(-1, width)

    @property
    def address(self) -> int:
        return self._runs.data_ptr()

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        finite = torch.nan_to_num(values)
        if self._dtype != torch.float32:
            limit = torch.finfo(self._dtype).max
            finite = finite.clamp_(-limit, limit).to(self._dtype)
        self._rows.index_copy_(0, rows, finite)

    def read(self, runs: torch.Tensor) -> torch.Tensor:
        return self._runs.index_select(0, runs).to(torch.float32)


class _ScaledRuns:
    """Hold runs like `_PlainRuns`, as codes of 8 bits with a float16 scale for each group of a row."""

    def __init__(self, num_runs: int, run_rows: int, width: int, kv_dtype: str) -> None:
        self._group, size = KV_FORMS[kv_dtype].num_values, run_rows * width
        self._codes = torch.from_numpy(np.zeros((num_runs, size), dtype=np.int8))
        self._scales = torch.from_numpy(np.zeros((num_runs, size // self._group), dtype=np.float16))
        self._width = width

    @property
    def address(self) -> int:
        raise AssertionError("compiled code reads no scales")

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        groups = torch.nan_to_num(values).reshape(-1, self._width // self._group, self._group)
        scales = (groups.abs().amax(-1) / _GREATEST_CODE).clamp_(*_SCALES).to(torch.float16)
        codes = (groups / scales.to(torch.float32).unsqueeze(-1)).round_()
        codes = codes.clamp_(-_GREATEST_CODE, _GREATEST_CODE).to(torch.int8)
        self._codes.view(-1, self._width).index_copy_(0, rows, codes.view(-1, self._width))
        self._scales.view(-1, self._width // self._group).index_copy_(0, rows, scales)

    def read(self, runs: torch.Tensor) -> torch.Tensor:
        scales = self._scales.index_select(0, runs).to(torch.float32)
        codes = self._codes.index_select(0, runs).to(torch.float32)
        return codes.view(*scales.shape, -1).mul_(scales.unsqueeze(-1)).view(len(runs), -1)


def _make_runs(num_runs: int, run_rows: int, width: int, kv_dtype: str) -> _PlainRuns | _ScaledRuns:
    kind = _PlainRuns if kv_dtype in _PLAIN else _ScaledRuns
    return kind(num_runs, run_rows, width, kv_dtype)


class KvPool:
    """Hold K and V of one layer: [2, num_blocks, kv_heads, block_size, head_dim].

    One head of one block is one contiguous run. A gather of blocks by (block, head) therefore copies whole
    runs into the layout that batched matmuls need. Memory that was never written reads as zero.
    """

    def __init__(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kv_dtype: str = "f32"
    ) -> None:
        self._shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self._runs = _make_runs(2 * num_blocks * num_kv_heads, block_size, head_dim, kv_dtype)

    @property
    def address(self) -> int:
        """Return the address of the first number, for compiled code."""
        return self._runs.address

    @property
    def addresses(self) -> tuple[int, int]:
        """Return the addresses that runs of K and of V count from, for compiled code."""
        return self._runs.address, self._runs.address

    @property
    def all_rows(self) -> torch.Tensor:
        """Return a float32 copy of the pool as rows [2 * num_blocks * kv_heads * block_size, head_dim]."""
        num_blocks, num_heads, _, head_dim = self._shape
        return self._runs.read(torch.arange(2 * num_blocks * num_heads)).view(-1, head_dim)

    def read_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return float32 K/V [2, positions, kv_heads, head_dim] of ``blocks``, int64, in their order."""
        _, num_heads, block_size, head_dim = self._shape
        found = self._runs.read(self._runs_of(blocks)).view(2, -1, num_heads, block_size, head_dim)
        return found.transpose(2, 3).reshape(2, -1, num_heads, head_dim)

    def write_blocks(self, blocks: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv``, shaped as `read_blocks` returns it, to ``blocks``."""
        _, num_heads, block_size, head_dim = self._shape
        runs = kv.view(2, len(blocks), block_size, num_heads, head_dim).transpose(2, 3)
        rows = self._runs_of(blocks)[:, None] * block_size + torch.arange(block_size)
        self._runs.write(rows.view(-1), runs.reshape(-1, head_dim))

    def write(self, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv`` [N, head_dim] at ``rows`` [N] of [2 * num_blocks * kv_heads * block_size]."""
        self._runs.write(rows, kv)

    def gather(self, runs: torch.Tensor, run_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather ``runs`` of [2 * num_blocks * kv_heads], K first; return K, V [.., run_rows, head_dim]."""
        found = self._runs.read(runs).view(2, -1, run_rows, self._shape[-1])
        return found[0], found[1]

    def _runs_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the runs [2 * blocks * kv_heads] of ``blocks``, those of K first."""
        num_blocks, num_heads, _, _ = self._shape
        both = torch.stack((blocks, blocks + num_blocks)).view(-1, 1)
        return (both * num_heads + torch.arange(num_heads)).view(-1)


class ApartPool:
    """Hold K and V of one layer apart, as they differ in width: [num_blocks, kv_heads, block_size, dim] each.

    The pool of a latent holds K alone: the first ``value_dim`` numbers of a key are its value.
    """

    def __init__(self, shape: HeadShape) -> None:
        size = (shape.num_blocks * shape.num_kv_heads, shape.block_size)
        self._head_dim, self._value_dim = shape.head_dim, shape.out_dim
        self._keys = _make_runs(*size, shape.head_dim, shape.kv_dtype)
        self._values = None if shape.latent else _make_runs(*size, shape.out_dim, shape.kv_dtype)

    @property
    def addresses(self) -> tuple[int, int]:
        """Return the addresses that runs of K and of V count from, for compiled code."""
        return self._keys.address, (self._values or self._keys).address

    def write(self, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv`` [N, head_dim + value_dim] at ``rows`` [N] of [num_blocks * kv_heads * block_size]."""
        self._keys.write(rows, kv[:, : self._head_dim])
        if self._values is not None:
            self._values.write(rows, kv[:, self._head_dim :])

    def gather(self, runs: torch.Tensor, run_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather ``runs`` of [num_blocks * kv_heads].

        Returns K [.., run_rows, head_dim] and V [.., run_rows, value_dim].
        """
        keys = self._keys.read(runs).view(-1, run_rows, self._head_dim)
        if self._values is None:
            return keys, keys[..., : self._value_dim]
        return keys, self._values.read(runs).view(-1, run_rows, self._value_dim)


class RowPool:
    """Hold rows of one layer that are not keys: [num_rows, width], float32."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._rows = torch.from_numpy(np.zeros((num_rows, width), dtype=np.float32))

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` [N, width] at ``rows`` [N]."""
        self._rows.index_copy_(0, rows, torch.nan_to_num(values))

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [.., width] of ``rows`` [..]."""
        return self._rows.index_select(0, rows.reshape(-1)).view(*rows.shape, -1)


def make_pool(shape: HeadShape) -> KvPool | ApartPool:
    """Return a new pool for one layer with heads of ``shape``."""
    if shape.is_joined:
        return KvPool(shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim, shape.kv_dtype)
    return ApartPool(shape)
