"""Compute attention of packed rows over a block pool on the device: cut tiles and launch kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from convoy.model.backends.cuda.kernels.language import next_power
from convoy.model.backends.cuda.kernels.paged import combine_kernel, paged_attention_kernel

LOG2_E = math.log2(math.e)
# The least number of rows, columns and depth of a matrix product in Triton.
_LEAST = 16
_PREFILL_ROWS = 128
# Keys of one step of the online softmax.
_KEYS = 64
_MAX_SPLITS = 32
# Attention programs that one multiprocessor needs to be busy.
_PROGRAMS_PER_UNIT = 4

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DeviceHeadShape:
    """Describe the heads of a layer's attention. ``window`` counts the token itself; None means no window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Return the number of query heads that share one K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def decode_rows(self) -> int:
        """Return the number of rows of a tile that holds one token."""
        return next_power(self.group, _LEAST)

    @property
    def prefill_rows(self) -> int:
        """Return the number of rows of a tile that holds several tokens."""
        # Wide heads get half as many rows, so that a tile stays as large.
        wide = max(self.head_dim, self.value_dim) > 128
        return next_power(self.group, _PREFILL_ROWS // 2 if wide else _PREFILL_ROWS)

    def num_splits(self, num_tiles: int, num_units: int) -> int:
        """Return among how many programs a lone token's keys are split.

        ``num_units`` is the device's number of multiprocessors.
        """
        wanted = _PROGRAMS_PER_UNIT * num_units // max(1, num_tiles * self.num_kv_heads)
        return min(_MAX_SPLITS, next_power(wanted + 1) // 2 if wanted else 1)


@dataclass(frozen=True)
class Launch:
    """Hold tiles of one size.

    ``tiles`` is int32 [num_tiles, 2] on the device: a row, and its first token in the tile.
    """

    tiles: torch.Tensor
    block_rows: int
    num_splits: int


@dataclass(frozen=True)
class Pool:
    """Hold one layer's K [num_blocks, kv_heads, block_size, head_dim] and V [.., value_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


def cut_tiles(lengths: Ints, shape: DeviceHeadShape) -> tuple[Ints, Ints]:
    """Return the tiles of rows of one token, and those of longer rows, each int32 [n, 2]."""
    alone = np.flatnonzero(lengths == 1)
    long = np.flatnonzero(lengths > 1)
    size = shape.prefill_rows // shape.group
    counts = -(-lengths[long] // size)
    steps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    lone_tiles = np.stack([alone, np.zeros_like(alone)], axis=1)
    long_tiles = np.stack([np.repeat(long, counts), steps * size], axis=1)
    return lone_tiles.astype(np.int32), long_tiles.astype(np.int32)


def attend(
    query: torch.Tensor,
    pool: Pool,
    shape: DeviceHeadShape,
    *,
    tables: torch.Tensor,
    rows: torch.Tensor,
    launches: tuple[Launch, ...],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention [T, num_heads * value_dim] of ``query`` [T, >= num_heads * head_dim].

    The pool already holds the K and V of these tokens. ``tables`` int32 holds all block tables, and
    ``rows`` int32 [num_rows, 5] is as in `kernels.paged`. ``sinks`` is float32 [num_heads], times log2(e).
    Result rows that no tile covers hold uninitialised memory.
    """
    out = query.new_empty(query.shape[0], shape.num_heads * shape.value_dim)
    cap = shape.softcap or 1.0
    for launch in launches:
        num_tiles, splits = launch.tiles.shape[0], launch.num_splits
        # Triton wants a pointer for every argument. Without splits or sinks the kernel never reads this one.
        parts, levels = (rows, rows) if splits == 1 else make_parts(query, launch, shape)
        paged_attention_kernel[num_tiles, shape.num_kv_heads, splits](
            *(out, parts, levels, query, pool.keys, pool.values, tables, rows, launch.tiles),
            rows if sinks is None else sinks,
            scale=shape.scale * LOG2_E if shape.softcap is None else shape.scale / cap,
            cap=cap * LOG2_E,
            window=shape.window or 0,
            query_stride=query.stride(0),
            SUNK=sinks is not None,
            **_constants(shape, launch),
        )
        if splits > 1:
            combine_kernel[num_tiles, shape.num_heads](
                *(out, parts, levels, rows, launch.tiles),
                NUM_HEADS=shape.num_heads,
                VALUE_DIM=shape.value_dim,
                VALUE_PAD=next_power(shape.value_dim, _LEAST),
                SPLITS=splits,
            )
    return out


def make_parts(
    query: torch.Tensor, launch: Launch, shape: DeviceHeadShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the parts and levels of a launch with splits, as `kernels.paged` describes them."""
    size = (launch.tiles.shape[0], shape.num_heads, launch.num_splits)
    parts = query.new_empty(*size, shape.value_dim, dtype=torch.float32)
    return parts, query.new_empty(*size, 2, dtype=torch.float32)


def _constants(shape: DeviceHeadShape, launch: Launch) -> dict[str, int]:
    return {
        "NUM_KV": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "HEAD_PAD": next_power(shape.head_dim, _LEAST),
        "VALUE_DIM": shape.value_dim,
        "VALUE_PAD": next_power(shape.value_dim, _LEAST),
        "BLOCK_SIZE": shape.block_size,
        "BLOCK_M": launch.block_rows,
        "BLOCK_N": _KEYS,
        "SPLITS": launch.num_splits,
        "CAPPED": shape.softcap is not None,
        "WINDOWED": shape.window is not None,
        "num_warps": 8 if launch.block_rows >= 128 else 4,
        "num_stages": 2,
    }
