"""Compute attention over paged pools in one call, with the bits of `model.layers.attention`."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from convoy.errors import StepError
from convoy.model.kernels.native.activation import exp_library
from convoy.model.kernels.native.library import (
    AttentionStruct,
    ChunkStruct,
    HeadsStruct,
    NativeLibrary,
    ShapeStruct,
    TilesStruct,
)
from convoy.model.kv.packed import KEY_BLOCK, GroupBatch, HeadShape, TileChunk
from convoy.model.kv.pool import ApartPool, KvPool

# For the dimensions of heads, and for the keys that lie side by side in a pool.
_VECTOR = 16
# Whole layers in compiled code have room for no wider heads.
_MAX_DIM = 256
# The dtypes of K/V that compiled code reads, and their numbers in `attention.h`.
_KV_DTYPES = {"f32": 0, "bf16": 1, "f16": 2}


@dataclass(frozen=True)
class _NativeChunk:
    # Kept alive: ``chunk`` has only the addresses of its tensors.
    tiles: TileChunk
    chunk: ChunkStruct
    num_scores: int


class NativeGroup:
    """Hold one step's batch of one cache group. The group's layers share it."""

    def __init__(self, group: GroupBatch, library: NativeLibrary | None = None) -> None:
        """Describe ``group`` to a library of `exp_library`. None means the best one."""
        shape = group.shape
        self.shape, self.num_tokens = shape, group.num_tokens
        self.write_rows = group.write_rows
        # Whether every tile is one token.
        self.is_lone = all(chunk.tile_tokens == 1 for chunk in group.chunks)
        self._chunks = [_native_chunk(shape, tiles) for tiles in group.chunks]
        # Of all chunks of lone rows.
        self.num_scores = sum(chunk.num_scores for chunk in self._chunks)
        self._heads: dict[int, HeadsStruct] = {}
        library = library or exp_library()
        assert library is not None, "nothing is compiled here"
        self._library = library
        self._group = group

    @functools.cached_property
    def _shape(self) -> ShapeStruct:
        shape = self.shape
        width = shape.head_dim if shape.latent or shape.is_joined else shape.out_dim
        return ShapeStruct(
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.out_dim, width),
            *(shape.block_size, _KV_DTYPES[shape.kv_dtype], int(shape.is_joined)),
        )

    @functools.cached_property
    def _room(self) -> tuple[ctypes.Array[TilesStruct], int, torch.Tensor]:
        """Return all tiles, the floats that a thread needs for them, and the memory of all threads.

        The layers of a step run one after the other, so they share it. Compiled layers need none of it.
        """
        chunks = self._group.chunks
        tiles = (TilesStruct * len(chunks))(*map(_native_tiles, chunks))
        floats: int = self._library.convoy_attend_floats(self._shape, tiles, len(tiles))
        return tiles, floats, torch.empty(floats * torch.get_num_threads())

    def attend(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotary_dim: int,
        pool: KvPool,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate, write K and V, and attend: [T, num_heads + 2 * kv_heads, dim] to [T, num_heads, dim].

        ``cos`` and ``sin`` are as `rope.spread_over_heads` returns them. Rows behind the batch's tokens
        become zeros. ``sinks`` is as for `layers.attention.attend`.
        """
        self.check(heads.shape, cos, sin, rotary_dim)
        assert heads.is_contiguous()
        assert heads.dtype == torch.float32
        turned = torch.empty(heads.shape)
        self._library.convoy_rotate(
            *(ctypes.byref(self._shape), heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), rotary_dim),
            *(turned.data_ptr(), pool.address, self.write_rows.data_ptr(), self.num_tokens),
            torch.get_num_threads(),
        )
        return self.attend_queries(turned[:, : self.shape.num_heads], pool, sinks)

    def attend_queries(
        self,
        query: torch.Tensor,
        pool: KvPool | ApartPool,
        sinks: torch.Tensor | None = None,
        cap: float | None = None,
    ) -> torch.Tensor:
        """Attend with scaled queries [T, num_heads, head_dim] to K and V that the pool has.

        Returns [T, num_heads, value_dim]. Rows behind the batch's tokens become zeros. ``sinks`` and ``cap``
        are as for `layers.attention.attend`.
        """
        shape, num_rows = self.shape, query.shape[0]
        if query.shape[1:] != (shape.num_heads, shape.head_dim) or num_rows < self.num_tokens:
            expected = [self.num_tokens, shape.num_heads, shape.head_dim]
            raise StepError(f"queries come as {list(query.shape)}, expected {expected}")
        if query.stride()[1:] != (shape.head_dim, 1):
            query = query.contiguous()
        assert query.dtype == torch.float32
        if sinks is not None:
            sinks = sinks.detach().to(torch.float32).contiguous()
            assert sinks.shape == (shape.num_heads,)
        make = torch.empty if num_rows == self.num_tokens else torch.zeros
        out = make(num_rows, shape.num_heads, shape.out_dim)
        keys, values = pool.addresses
        tiles, floats, memory = self._room
        threads = min(torch.get_num_threads(), memory.shape[0] // floats)
        self._library.convoy_attend(
            ctypes.byref(
                AttentionStruct(
                    *(ctypes.pointer(self._shape), tiles, len(tiles)),
                    *(query.data_ptr(), query.stride(0), keys, values),
                    *(None if sinks is None else sinks.data_ptr(), memory.data_ptr(), out.data_ptr()),
                    cap or 0.0,
                )
            ),
            threads,
        )
        return out

    @property
    def chunks(self) -> list[ChunkStruct]:
        """Return the chunks in the form that compiled layers read.

        They are valid while this object is alive.
        """
        return [chunk.chunk for chunk in self._chunks]

    def heads(self, rotary_dim: int) -> HeadsStruct:
        """Return the geometry of the heads in the form that compiled layers read."""
        shape, of = self.shape, self._heads.get(rotary_dim)
        if of is None:
            of = HeadsStruct(
                *(shape.num_heads, shape.num_kv_heads, shape.head_dim, rotary_dim, shape.block_size),
                _KV_DTYPES[shape.kv_dtype],
            )
            self._heads[rotary_dim] = of
        return of

    def check(self, heads: tuple[int, ...], cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> None:
        """Check the shapes of heads and of their factors. Raises StepError.

        Compiled code takes addresses, and would read and write outside a tensor of another shape.
        """
        shape = self.shape
        row = (shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        same = heads == cos.shape == sin.shape and heads[1:] == row
        if not same or heads[0] < self.num_tokens or rotary_dim > shape.head_dim:
            raise StepError(
                f"heads come as {list(heads)} with {rotary_dim} dimensions to turn, expected "
                f"{[self.num_tokens, *row]} and at most {shape.head_dim}"
            )
        assert all(part.is_contiguous() and part.dtype == torch.float32 for part in (cos, sin))


def native_group(group: GroupBatch) -> NativeGroup | None:
    """Return compiled code for ``group``.

    Returns None where nothing is compiled, and for heads that compiled code does not support.
    """
    return NativeGroup(group) if exp_library() is not None and fits_native(group.shape) else None


def fits_native(shape: HeadShape) -> bool:
    """Return whether compiled code supports heads of this shape.

    Their bits are compared by `attention_check`.
    """
    widths = (shape.head_dim, shape.out_dim, shape.block_size)
    whole = all(width % _VECTOR == 0 for width in widths) and shape.kv_dtype in _KV_DTYPES
    return whole and (shape.head_dim <= _MAX_DIM or not shape.is_joined)


def _native_tiles(tiles: TileChunk) -> TilesStruct:
    num_pairs = tiles.pair_tile.shape[0]
    tensors = (tiles.query_rows, tiles.kv_runs, tiles.bag_pairs, tiles.bag_starts, tiles.hidden)
    return TilesStruct(
        *(tensor.data_ptr() for tensor in tensors),
        *(tiles.num_tiles, num_pairs, tiles.hidden.shape[0], tiles.longest, tiles.tile_tokens),
    )


def _native_chunk(shape: HeadShape, tiles: TileChunk) -> _NativeChunk:
    num_pairs = tiles.pair_tile.shape[0]
    tensors = (tiles.query_rows, tiles.kv_runs, tiles.bag_pairs, tiles.bag_starts, tiles.hidden)
    chunk = ChunkStruct(
        *(tensor.data_ptr() for tensor in tensors),
        *(tiles.num_tiles, num_pairs, tiles.hidden.shape[0], tiles.longest),
    )
    return _NativeChunk(tiles, chunk, num_pairs * shape.group * KEY_BLOCK)
