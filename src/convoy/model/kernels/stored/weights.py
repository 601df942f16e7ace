"""Cut and join weights that are either tensors or matrices in the form of their file.

Layers are built from both: a float32 file gives tensors, and all other files give stored matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from convoy.model.kernels.stored.matrix import DeferredRange, StoredMatrix, StoredRange

# The names that `StoredMatrix` has for plain numbers.
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Weights of a deferred range that are made at a time.
MADE_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class StoredStack:
    """Hold the matrices [outputs, inputs] of a layer's experts, in the order of their numbers.

    If it ``is_joined``, all outputs of gates lie before those of ups, where the library has them in turn.
    """

    matrices: tuple[StoredMatrix, ...]
    is_joined: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the numbers of experts, outputs and inputs."""
        return (len(self.matrices), *self.matrices[0].shape)


Weight = torch.Tensor | StoredMatrix
# What a checkpoint gives for one name.
Stored = Weight | StoredStack


def plain_matrix(values: torch.Tensor) -> StoredMatrix:
    """Return a matrix of floating-point numbers [outputs, inputs], over the same memory."""
    outputs, inputs = values.shape
    return StoredMatrix((StoredRange(_PLAIN[values.dtype], outputs, inputs, {"values": values}),))


def plain_stack(values: torch.Tensor) -> StoredStack:
    """Return a stack of floating-point matrices [experts, outputs, inputs], over the same memory."""
    return StoredStack(tuple(plain_matrix(one) for one in values))


def own_memory(matrix: StoredMatrix) -> StoredMatrix:
    """Return a copy that shares no memory with a mapped file."""
    return StoredMatrix(tuple(own_range(one) for one in matrix.ranges))


def own_range(one: StoredRange | DeferredRange) -> StoredRange:
    """Return a copy of a range that shares no memory with a mapped file. A deferred one is made."""
    if isinstance(one, DeferredRange):
        return _made(one)
    layout = torch.contiguous_format
    return replace(one, parts={role: part.clone(memory_format=layout) for role, part in one.parts.items()})


def _made(one: DeferredRange) -> StoredRange:
    sample = one.sample
    parts = {
        role: torch.empty(one.outputs, *part.shape[1:], dtype=part.dtype)
        for role, part in sample.parts.items()
    }
    for first, piece in one.pieces(MADE_ELEMENTS):
        for role, part in piece.parts.items():
            parts[role][first : first + piece.outputs] = part
    return replace(sample, outputs=one.outputs, parts=parts)


def dense_of(value: Stored, *, turned: bool) -> torch.Tensor:
    """Return all values, as the library has them: its stacks may be [experts, inputs, outputs]."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, StoredMatrix):
        return value.dense()
    whole = torch.stack([matrix.dense() for matrix in value.matrices])
    if value.is_joined:
        count, outputs, inputs = whole.shape
        whole = whole.view(count, 2, outputs // 2, inputs).transpose(1, 2).flatten(1, 2)
    return whole.mT.contiguous() if turned else whole


def take_rows(weight: Weight, index: slice | torch.Tensor) -> Weight:
    """Return some outputs of [outputs, inputs], in the order of a slice or of an index tensor."""
    if isinstance(weight, torch.Tensor):
        return weight[index]
    if isinstance(index, slice) and index.step not in (None, 1):
        index = torch.arange(*index.indices(weight.shape[0]))
    return weight.rows(index)


def join_rows(weights: Sequence[Weight]) -> Weight:
    """Return weights of the same inputs as one, with their outputs one after the other.

    They are a tensor if all of them are. Beside stored matrices, a tensor is a range of plain numbers.
    """
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(tensors) == len(weights):
        return torch.cat(tensors)
    matrices = (plain_matrix(one.detach()) if isinstance(one, torch.Tensor) else one for one in weights)
    return StoredMatrix.joined(list(matrices))
