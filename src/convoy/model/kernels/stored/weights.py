"""Cut and join weights that are either tensors or matrices in the form of their file.

Layers are built from both: a float32 file gives tensors, and all other files give stored matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange

# The names that `StoredMatrix` has for plain numbers.
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, eq=False)
class StoredStack:
    """Hold the matrices [outputs, inputs] of a layer's experts, in the order of their numbers."""

    matrices: tuple[StoredMatrix, ...]

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


def own_range(one: StoredRange) -> StoredRange:
    """Return a copy of a range that shares no memory with a mapped file."""
    layout = torch.contiguous_format
    return replace(one, parts={role: part.clone(memory_format=layout) for role, part in one.parts.items()})


def take_rows(weight: Weight, index: slice | torch.Tensor) -> Weight:
    """Return some outputs of [outputs, inputs], in the order of a slice or of an index tensor."""
    if isinstance(weight, torch.Tensor):
        return weight[index]
    if isinstance(index, slice) and index.step not in (None, 1):
        index = torch.arange(*index.indices(weight.shape[0]))
    return weight.rows(index)


def join_rows(weights: Sequence[Weight]) -> Weight:
    """Return weights of the same inputs as one, with their outputs one after the other.

    If one of them is a tensor, all are unpacked to one.
    """
    matrices = [weight for weight in weights if isinstance(weight, StoredMatrix)]
    if len(matrices) == len(weights):
        return StoredMatrix.joined(matrices)
    return torch.cat([one if isinstance(one, torch.Tensor) else one.dense() for one in weights])
