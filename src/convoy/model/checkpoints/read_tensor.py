"""Read a tensor of a model, however its checkpoint stores it: plain, synthetic, or quantised."""

from __future__ import annotations

import torch

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import map_tensor
from convoy.model.checkpoints.formats.unpacking import Unpacking
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import draw_tensor
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
from convoy.model.kernels.stored.weights import Stored, StoredStack, plain_matrix, plain_stack
from convoy.plan.spec.registry import FAMILIES

_AGAIN = "fetch the model's file again: it is damaged"


def read_tensor(source: ModelSource, name: str) -> torch.Tensor:
    """Return tensor ``name`` of the model: mapped if it is stored plainly, else in newly allocated memory.

    Raises ModelError naming file and tensor.
    """
    whole = source.layout.made.get(name)
    if whole is not None:
        out = torch.empty(whole.shape, dtype=getattr(torch, whole.dtype))
        unpack_into(out, source, name)
        return out
    stored = source.tensors[name]
    return map_tensor(stored) if source.seed is None else draw_tensor(stored, source.seed)


def read_kept(source: ModelSource, name: str) -> Stored:
    """Return a matrix, or a stack of them, in the form of its file, over mapped memory.

    ``name`` is one that `StoredLayout.kept` lists. Raises ModelError naming file and tensor.
    """
    whole = source.layout.made.get(name)
    if whole is not None:
        found = whole.kept({role: map_tensor(part) for role, part in whole.parts.items()})
        assert found is not None, "only names of `StoredLayout.kept` are asked for"
        _require_numbers(found, whole)
        return found
    values = map_tensor(source.tensors[name])
    if values.ndim == 2:
        return plain_matrix(values)
    return plain_stack(values.mT if FAMILIES[source.spec.family].transposed_experts else values)


def _require_numbers(found: Stored, whole: Unpacking) -> None:
    """Raise ModelError for a scale that is no number: every weight under it would be none either."""
    matrices = found.matrices if isinstance(found, StoredStack) else (found,)
    ranges = [one for matrix in matrices if isinstance(matrix, StoredMatrix) for one in matrix.ranges]
    if not all(one.has_numbers() for one in ranges if isinstance(one, StoredRange)):
        part = next(iter(whole.parts.values()))
        raise ModelError(f"{part.path}: {whole.name} has a scale that is not a number", hint=_AGAIN)


def unpack_into(out: torch.Tensor, source: ModelSource, name: str) -> None:
    """Unpack a quantised tensor into ``out``, on the device of ``out``. Raises ModelError if the shapes
    differ.
    """
    whole = source.layout.made[name]
    if tuple(out.shape) != whole.shape:
        raise ModelError(f"{source.name}: {name} has shape {list(whole.shape)}, expected {list(out.shape)}")
    parts = {role: map_tensor(part).to(out.device) for role, part in whole.parts.items()}
    with torch.no_grad():
        for index, values in whole.pieces(parts):
            out[index].copy_(values)
