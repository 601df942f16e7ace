"""Run whole layers for rows of one token: one compiled call for all of them, with the bits of their parts.

At one row, the torch operators of a layer and the Python between them take as long as reading a sixth of
the layer's weights. A layer with routers and experts takes some calls: see `layers.compiled.NativeExperts`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from convoy.errors import StepError
from convoy.model.backends.host.layer_description import LayerDescription
from convoy.model.kernels.linear import pad_rows
from convoy.model.kernels.native.activation import exp_library
from convoy.model.kernels.native.attention import NativeGroup
from convoy.model.kernels.native.library import ChunkStruct, LayerRunStruct, WorkStruct
from convoy.model.kernels.native.linears import MAX_F32_ROWS
from convoy.model.kv.pool import KvPool
from convoy.model.layers.attention import LayerBatch
from convoy.model.layers.rope import Rotation

Batch = Mapping[int, LayerBatch | Any]
_FLOAT = 4


class NativeLayers:
    """Run some layers of a stage. Not thread-safe, as the stage is not."""

    # Attention scores of a step. Beyond that attention takes the time, and goes through caches in chunks.
    max_scores = 1 << 20

    def __init__(self, layers: Mapping[int, LayerDescription]) -> None:
        library = exp_library()
        assert library is not None, "nothing is compiled here"
        self._library = library
        self._layers = dict(layers)
        # The width of the memory that all layers share.
        self._between = max(one.between for one in layers.values())

    @property
    def numbers(self) -> frozenset[int]:
        """Return the layers that run here."""
        return frozenset(self._layers)

    def can_run(self, num_rows: int, batch: Batch) -> bool:
        """Return whether the layers run here for a batch: few rows of one token, with scores for a cache.

        ``batch`` maps layers to the arguments that layers take.
        """
        if not 0 < num_rows <= MAX_F32_ROWS:
            return False
        for number in self._layers:
            of = batch[number]
            if not isinstance(of, LayerBatch) or of.native is None or not isinstance(of.pool, KvPool):
                return False
            if not of.native.is_lone or of.native.num_scores > self.max_scores:
                return False
        return True

    def run(
        self,
        numbers: Sequence[int],
        x: torch.Tensor,
        rotations: Mapping[int, Rotation],
        batch: Batch,
    ) -> torch.Tensor:
        """Run consecutive layers on float32 [T, hidden] of a batch that it `can_run`. Return the same shape.

        ``rotations`` has each layer's rotation. Rows behind the batch's tokens are padding. Forward hooks of
        a layer are called without inputs and outputs. Raises StepError as `NativeGroup.attend` does, and
        MemoryError.
        """
        step = _Step(x, self._between)
        done = True
        for has_experts, some in itertools.groupby(
            numbers, lambda number: self._layers[number].elsewhere is not None
        ):
            stretch = [step.run_of(self._layers[number], batch[number], rotations[number]) for number in some]
            done = done and (self._run_in_calls(stretch, step) if has_experts else self._run_whole(stretch))
        if not done:
            raise MemoryError(f"there is no memory for {x.shape[0]} rows of 8 bits")
        # Forward hooks count a layer's runs, so they are called for compiled layers too.
        for number in numbers:
            layer = self._layers[number].layer
            for told in layer._forward_hooks.values():
                told(layer, (), None)
        return step.x

    def _run_whole(self, stretch: Sequence[_Run]) -> bool:
        """Run layers in one call. Return False where there is no memory."""
        runs = (LayerRunStruct * len(stretch))(
            *(LayerRunStruct(layer.pointer, work.pointer, pool) for layer, work, pool in stretch)
        )
        return bool(self._library.convoy_layers(runs, len(runs)))

    def _run_in_calls(self, stretch: Sequence[_Run], step: _Step) -> bool:
        """Run layers with experts. Return False where there is no memory."""
        for layer, work, pool in stretch:
            if not self._library.convoy_layer_begin(layer.pointer, work.pointer, pool):
                return False
            rows = pad_rows(step.normed) if layer.pads_rows else step.normed
            step.made.copy_(layer.run_elsewhere(rows)[: step.x.shape[0]])
            self._library.convoy_layer_end(layer.pointer, work.pointer)
        return True


class _Step:
    """Hold the memory of a step, and the structs that tell compiled code where it lies."""

    def __init__(self, x: torch.Tensor, between: int) -> None:
        rows, hidden = x.shape
        self.x = x.clone(memory_format=torch.contiguous_format)
        # In one piece, as each call of torch takes some microseconds.
        own = torch.empty(rows * (2 * hidden + 3 * between))
        self.normed, self.made = own[: 2 * rows * hidden].view(2, rows, hidden).unbind()
        both = own.data_ptr() + _FLOAT * 2 * rows * hidden
        self.places = (self.x.data_ptr(), self.normed.data_ptr(), self.made.data_ptr())
        self.last_places = (both, both + _FLOAT * 2 * rows * between)
        # Kept alive: the structs have only addresses.
        self.held = own
        # By group and rotation, because layers that share both can share their working memory.
        self._works: dict[tuple[int, int, bool], _Work] = {}

    def run_of(self, layer: LayerDescription, batch: LayerBatch, rotation: Rotation) -> _Run:
        """Return a layer with its working memory, and the address of its pool."""
        group = batch.native
        assert group is not None, "`can_run` checks this"
        assert isinstance(batch.pool, KvPool), "`can_run` checks this"
        key = (id(group), id(rotation[0]), layer.has_sinks)
        if key not in self._works:
            self._works[key] = _Work(self, layer, group, rotation)
        return layer, self._works[key], batch.pool.address


class _Work:
    """Hold the working memory of the layers of one cache group and rotation."""

    def __init__(self, step: _Step, layer: LayerDescription, group: NativeGroup, rotation: Rotation) -> None:
        shape, rows = group.shape, step.x.shape[0]
        cos, sin = rotation if layer.is_spread else (part[0].contiguous() for part in rotation)
        rotary_dim = layer.rotary_dim(cos)
        heads = (rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        if layer.is_spread:
            group.check(heads, cos, sin, rotary_dim)
        elif cos.shape != sin.shape or len(cos) < group.num_tokens or rotary_dim > shape.head_dim:
            raise StepError(
                f"rotations come as {list(cos.shape)}, expected {group.num_tokens} rows of at most "
                f"{shape.head_dim}"
            )
        num_sinks = sum(chunk.num_tiles for chunk in group.chunks) * shape.group if layer.has_sinks else 0
        sizes = (
            *(math.prod(heads), math.prod(heads), rows * shape.num_heads * shape.head_dim),
            *(group.num_scores, num_sinks),
        )
        own = torch.empty(sum(sizes))
        first = own.data_ptr()
        turned, mixed, shares, sunk = (first + _FLOAT * end for end in itertools.accumulate(sizes[:-1]))
        chunks = (ChunkStruct * len(group.chunks))(*group.chunks)
        struct = WorkStruct(
            *(*step.places, first, turned, mixed, *step.last_places, shares, sunk),
            *(tensor.data_ptr() for tensor in (cos, sin, group.write_rows)),
            *(ctypes.pointer(group.heads(rotary_dim)), chunks, len(chunks)),
            *(rows, group.num_tokens, torch.get_num_threads()),
        )
        self.pointer = ctypes.pointer(struct)
        # Kept alive: the struct has only addresses.
        self._held = (step.held, group, chunks, cos, sin, own)


# A layer, its working memory, and the address of its pool.
_Run = tuple[LayerDescription, _Work, int]
