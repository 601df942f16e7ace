"""Round a model's matrices while a stage loads it: ``--quantize``, as `convoy quantize` rounds them.

Each matrix becomes what a reader of the written checkpoint would give for it. Codes and scales are made as
linears are packed, some outputs at a time, so no rounded matrix exists beside its packed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from convoy.errors import ModelError
from convoy.model.checkpoints.read_tensor import read_kept, read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.matrix import DeferredRange, StoredMatrix, StoredRange
from convoy.model.kernels.stored.weights import Stored, StoredStack
from convoy.model.quantize.parts import MatrixPart, matrix_parts, require_rounded
from convoy.model.quantize.record import ErrorSums
from convoy.model.quantize.search import GROUP, Rows, input_weights, round_matrix
from convoy.plan.spec.registry import FAMILIES


class LoadRounding:
    """Round the matrices of ``source`` to ``bits``, 4 or 8."""

    def __init__(self, source: ModelSource, bits: int, errors: ErrorSums | None = None) -> None:
        """Add the errors of all that is made to ``errors``.

        Raises ModelError for a model without a matrix that is rounded.
        """
        require_rounded(source, bits)
        self._source, self._bits = source, bits
        self._errors = ErrorSums() if errors is None else errors
        self._shapes = source.layout.shapes(source.tensors)

    def read(self, name: str) -> StoredMatrix | StoredStack | None:
        """Return a tensor of the model, of which nothing is read or rounded yet; None if it stays as it is.

        Making outputs of the result raises ModelError naming file and tensor.
        """
        shape = self._shapes[name]
        parts = matrix_parts(self._source, name, shape, self._bits)
        if not any(part.bits for part in parts):
            return None
        whole = _Whole(self._source, name)
        matrices = [StoredMatrix((self._deferred(whole, part),)) for part in parts]
        if len(shape) == 2:
            return matrices[0]
        of_expert = len(matrices) // shape[0]
        runs = (matrices[start : start + of_expert] for start in range(0, len(matrices), of_expert))
        return StoredStack(tuple(map(StoredMatrix.joined, runs)))

    def _deferred(self, whole: _Whole, part: MatrixPart) -> DeferredRange:
        outputs, inputs = part.shape
        like = stored_range(
            torch.zeros(1, inputs * part.bits // 32, dtype=torch.int32),
            torch.zeros(1, inputs // GROUP, dtype=torch.bfloat16),
            part.bits,
        )
        rounder = _Rounder(self._source.name, whole, part, self._errors)
        return DeferredRange(rounder, like, torch.arange(outputs), 0, inputs)


class _Whole:
    """Read a tensor of the model when a part of it is first needed."""

    def __init__(self, source: ModelSource, name: str) -> None:
        self._source, self._name = source, name

    def part(self, index: Sequence[int | slice]) -> Rows:
        """Return the matrix at a place; where that is possible, its rows are unpacked when asked for."""
        found = self._stored
        if isinstance(found, torch.Tensor):
            return found[tuple(index)]
        if isinstance(found, StoredStack):
            first, *index = index
            assert isinstance(first, int), "a part of a stack is of one expert"
            found = found.matrices[first]
        (rows,) = index or (slice(None),)
        assert isinstance(rows, slice), "a part of a matrix is a run of its rows"
        made = self._source.layout.made.get(self._name)
        return _KeptRows(found.rows(rows), getattr(torch, made.dtype) if made else torch.float32)

    @cached_property
    def _stored(self) -> Stored:
        whole = self._source.layout.made.get(self._name)
        if whole is not None and whole.kept_bytes:
            return read_kept(self._source, self._name)
        found = read_tensor(self._source, self._name)
        is_turned = FAMILIES[self._source.spec.family].transposed_experts and found.ndim == 3
        return found.mT if is_turned else found


class _KeptRows:
    """Unpack rows of a stored matrix, with the rounding of the format's reader."""

    def __init__(self, matrix: StoredMatrix, dtype: torch.dtype) -> None:
        self._matrix, self._dtype = matrix, dtype
        self.shape = matrix.shape

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        some = self._matrix
        found = some.rows(rows).dense() if isinstance(rows, slice) else some.row_values(rows)
        return found.to(self._dtype)


class _Rounder:
    """Round some outputs of one matrix, with the weights of all of its inputs."""

    def __init__(self, model: str, whole: _Whole, part: MatrixPart, errors: ErrorSums) -> None:
        self._model, self._whole, self._part, self._errors = model, whole, part, errors

    def __call__(self, ids: torch.Tensor) -> StoredRange:
        rows, weights = self._input
        found = round_matrix(rows[ids], self._part.bits, weights)
        if not math.isfinite(found.error):
            raise ModelError(f"{self._model}: {self._part.name} holds a value that is not a number")
        squares = (found.square, found.error, found.nearest_error)
        self._errors.add(self._part.name, self._part.bits, squares)
        return stored_range(found.packed(self._part.bits), found.scales, self._part.bits)

    @cached_property
    def _input(self) -> tuple[Rows, torch.Tensor]:
        rows = self._whole.part(self._part.index)
        return rows, input_weights(rows)


def stored_range(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> StoredRange:
    """Return outputs in the form in which compressed-tensors' files are kept.

    ``codes`` are packed words, int32 [outputs, inputs * bits / 32]; ``scales`` are [outputs, groups].
    """
    outputs, num_groups = scales.shape
    group = GROUP if num_groups > 1 else 0
    return StoredRange(
        f"centred{bits}", outputs, num_groups * GROUP, {"codes": codes, "scales": scales}, group
    )
