"""Compute attention of rows of one token each in four calls, with the bits of `model.layers.attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convoy.errors import StepError
from convoy.model.kernels.native.library import ChunkStruct, HeadsStruct, native_library
from convoy.model.kv.packed import KEY_BLOCK, GroupBatch, HeadShape, TileChunk
from convoy.model.kv.pool import KvPool

_MAX_DIM = 256
_VECTOR = 16
# Starting a second thread takes longer than so few pairs.
_FEW_PAIRS = 4
# The dtypes of K/V that compiled code reads, and their numbers in `kernels.c`.
_KV_DTYPES = {"f32": 0, "bf16": 1, "f16": 2}


@dataclass(frozen=True)
class _NativeChunk:
    # Kept alive: ``chunk`` has only the addresses of its tensors.
    tiles: TileChunk
    chunk: ChunkStruct
    num_scores: int
    num_pairs: int


class NativeGroup:
    """Hold one step's batch of one cache group, in which every tile is one token.

    The group's layers share it.
    """

    def __init__(self, group: GroupBatch) -> None:
        shape = group.shape
        self.shape, self.num_tokens = shape, group.num_tokens
        self.write_rows = group.write_rows
        self._chunks = [_native_chunk(shape, tiles) for tiles in group.chunks]
        self._heads: dict[int, HeadsStruct] = {}
        library = native_library()
        assert library is not None, "nothing is compiled here"
        self._library = library

    def attend(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int, pool: KvPool
    ) -> torch.Tensor:
        """Rotate, write K and V, and attend: [T, num_heads + 2 * kv_heads, dim] to [T, num_heads, dim].

        ``cos`` and ``sin`` are as `rope.spread_over_heads` returns them. Rows behind the batch's tokens
        become zeros.
        """
        shape, library, num_rows = self.shape, self._library, heads.shape[0]
        self.check(heads, cos, sin, rotary_dim)
        of = self.heads(rotary_dim)
        turned = torch.empty(heads.shape)
        library.convoy_turn(
            *(of, heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), turned.data_ptr(), pool.address),
            *(self.write_rows.data_ptr(), self.num_tokens),
        )
        make = torch.empty if num_rows == self.num_tokens else torch.zeros
        out = make(num_rows, shape.num_heads, shape.head_dim)
        for chunk in self._chunks:
            threads = torch.get_num_threads() if chunk.num_pairs > _FEW_PAIRS else 1
            shares = torch.empty(chunk.num_scores)
            library.convoy_scores(
                *(of, chunk.chunk, turned.data_ptr(), pool.address, shares.data_ptr(), threads)
            )
            # Torch's own `exp`: a compiled one would have other bits.
            shares.exp_()
            library.convoy_mix(*(of, chunk.chunk, pool.address, shares.data_ptr(), out.data_ptr(), threads))
        return out

    @property
    def num_scores(self) -> int:
        """Return the number of scores of all chunks."""
        return sum(chunk.num_scores for chunk in self._chunks)

    @property
    def chunks(self) -> list[ChunkStruct]:
        """Return the chunks in the form that compiled code reads.

        They are valid while this object is alive.
        """
        return [chunk.chunk for chunk in self._chunks]

    def heads(self, rotary_dim: int) -> HeadsStruct:
        """Return the geometry of the heads in the form that compiled code reads."""
        shape, of = self.shape, self._heads.get(rotary_dim)
        if of is None:
            of = HeadsStruct(
                *(shape.num_heads, shape.num_kv_heads, shape.head_dim, rotary_dim, shape.block_size),
                _KV_DTYPES[shape.kv_dtype],
            )
            self._heads[rotary_dim] = of
        return of

    def check(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> None:
        """Check the shapes. Raises StepError.

        Compiled code takes addresses, and would read and write outside a tensor of another shape.
        """
        shape = self.shape
        row = (shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        same = heads.shape == cos.shape == sin.shape and heads.shape[1:] == row
        if not same or heads.shape[0] < self.num_tokens or rotary_dim > shape.head_dim:
            raise StepError(
                f"heads come as {list(heads.shape)} with {rotary_dim} dimensions to turn, expected "
                f"{[self.num_tokens, *row]} and at most {shape.head_dim}"
            )
        assert all(part.is_contiguous() and part.dtype == torch.float32 for part in (heads, cos, sin))


def native_group(group: GroupBatch) -> NativeGroup | None:
    """Return compiled code for ``group``.

    Returns None where nothing is compiled, and for batches and heads that compiled code does not support.
    """
    shape = group.shape
    if native_library() is None or not fits_native(shape):
        return None
    if any(chunk.tile_tokens != 1 for chunk in group.chunks):
        return None
    return NativeGroup(group)


def fits_native(shape: HeadShape) -> bool:
    """Return whether compiled code supports heads of this shape.

    Their bits are compared by `attention_check`.
    """
    whole = shape.head_dim % _VECTOR == 0 and shape.head_dim <= _MAX_DIM and shape.block_size % _VECTOR == 0
    return whole and shape.is_joined and shape.kv_dtype in _KV_DTYPES


def _native_chunk(shape: HeadShape, tiles: TileChunk) -> _NativeChunk:
    num_pairs, longest = tiles.pair_tile.shape[0], tiles.tile_pairs.shape[1]
    tensors = (tiles.query_rows, tiles.kv_runs, tiles.bag_pairs, tiles.bag_starts, tiles.hidden)
    chunk = ChunkStruct(
        *(tensor.data_ptr() for tensor in tensors),
        *(tiles.tile_pairs.shape[0], num_pairs, tiles.hidden.shape[0], longest),
    )
    return _NativeChunk(tiles, chunk, num_pairs * shape.group * KEY_BLOCK, num_pairs)
