"""Read tensors into MLX arrays, and keep the codes of quantised matrices as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from convoy.errors import ModelError
from convoy.model.backends.mlx.arrays import DTYPES, to_mlx
from convoy.model.backends.mlx.codes import lay_out
from convoy.model.backends.mlx.layers.experts import ExpertStack
from convoy.model.backends.mlx.layers.matrices import CodedMatrix, Linear, Matrix, PlainMatrix
from convoy.model.backends.mlx.slices import RankSlicer, evaluated
from convoy.model.backends.mlx.supported import FLOAT_FORMS, ON_CPU, FloatCodes
from convoy.model.checkpoints.checkpoint import map_tensor
from convoy.model.checkpoints.formats.arrange import Composed, Plain
from convoy.model.checkpoints.formats.fp8 import WordFloats
from convoy.model.checkpoints.formats.mlx import AffineRows
from convoy.model.checkpoints.formats.mxfp4 import RowFloats, TurnedFloats
from convoy.model.checkpoints.formats.nvfp4 import GroupedFloats
from convoy.model.checkpoints.formats.unpacking import JoinedRows, Unpacking
from convoy.model.checkpoints.names import decoder_name
from convoy.model.checkpoints.owned import owned_tensors
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.matrix import PLACES, StoredMatrix, StoredRange
from convoy.model.kernels.stored.weights import StoredStack
from convoy.wire.messages.control import StageAssignment

LoadProgress = Callable[[int, int], None]

_PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class _Mode:
    """Name a mode of small floats in MLX. A scale of which all bits of ``nan`` are set is not a number."""

    name: str
    group: int
    bits: int
    nan: int


_MXFP4 = _Mode("mxfp4", 32, 4, 0xFF)
_MODES: dict[type[Unpacking], _Mode] = {
    RowFloats: _MXFP4,
    TurnedFloats: _MXFP4,
    WordFloats: _Mode("mxfp8", 32, 8, 0xFF),
    GroupedFloats: _Mode("nvfp4", 16, 4, 0x7F),
}

Stacks = tuple[ExpertStack, ExpertStack, ExpertStack]


class TensorReader:
    """Copy the tensors of a stage one by one, under their names in the decoder, and report the progress."""

    def __init__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        dtype: str,
        progress: LoadProgress | None,
        *,
        layers: Collection[int],
        slicer: RankSlicer,
    ) -> None:
        self._source = source
        self.slicer = slicer
        self.dtype = DTYPES[dtype]
        self._progress = progress
        # A file's names by those in the decoder: some files hold more than text.
        self._names = {decoder_name(name): name for name in (*source.tensors, *source.layout.made)}
        owned = owned_tensors(source, layers, embed=assignment.embed, output=assignment.output)
        self._total = sum(stored.num_bytes for stored in owned)
        self.bytes_read = 0

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name."""
        return name in self._names

    def plain(self, name: str, dtype: mx.Dtype | None = None, *, plus_one: bool = False) -> mx.array:
        """Return a tensor in the dtype of the activations, or another. Raises ModelError if it is missing."""
        stored = self._names.get(name)
        if stored is None:
            raise ModelError(
                f"{self._source.name}: the checkpoint has no tensor {name}",
                hint="a shard is missing or the directory is of another model",
            )
        values = read_tensor(self._source, stored)
        found = to_mlx(values.float() + 1 if plus_one else values, dtype or self.dtype)
        whole = self._source.layout.made.get(stored)
        parts = [self._source.tensors[stored]] if whole is None else whole.parts.values()
        self._count([found], sum(part.num_bytes for part in parts))
        return found

    def optional(self, name: str) -> mx.array | None:
        """Return a tensor in the dtype of the activations, or None if the checkpoint lacks it."""
        return self.plain(name) if self.has(name) else None

    def matrix(self, module: str) -> Matrix:
        """Return the matrix of ``module``, with its codes if it has any."""
        name = f"{module}.weight"
        whole = self._whole(name)
        # Embeddings are rounded to the dtype of their scales, so codes do not tell their float32 values.
        if whole is None or (self.dtype == mx.float32 and whole.dtype != "float32"):
            return PlainMatrix(self.plain(name))
        if isinstance(whole, Plain | Composed) and not whole.kept_form:
            return PlainMatrix(self.plain(name))
        if whole.kept_form in FLOAT_FORMS:
            return PlainMatrix(self.plain(name))
        return self._coded(whole)

    def linear(self, module: str) -> Linear:
        """Return this rank's slice of the matrix of ``module``, and of its bias if it has one."""
        whole = Linear(self.matrix(module), self.optional(f"{module}.bias"))
        return self.slicer.linear(module, whole)

    def stacks(self, prefix: str, *, transposed: bool) -> Stacks:
        """Return this rank's gates, ups and downs of experts, whether the file has stacks or single experts.

        ``transposed`` stacks are [experts, inputs, outputs], with columns of gate and up in turn.
        """
        gate, up, down = self._whole_stacks(prefix, transposed=transposed)
        own = (
            self.slicer.stack(f"{prefix}{part}_proj", one)
            for part, one in zip(_PARTS, (gate, up, down), strict=True)
        )
        return next(own), next(own), next(own)

    def _whole_stacks(self, prefix: str, *, transposed: bool) -> Stacks:
        if not self.has(f"{prefix}gate_up_proj"):
            single = [ExpertStack(self._stack(prefix, part)) for part in _PARTS]
            return single[0], single[1], single[2]
        gate_up, bias = self._pair(f"{prefix}gate_up_proj", transposed=transposed), None
        if self.has(f"{prefix}gate_up_proj_bias"):
            bias = self.plain(f"{prefix}gate_up_proj_bias")
        biases = (None, None) if bias is None else (bias[:, 0::2], bias[:, 1::2])
        gate, up = (ExpertStack(matrix, own) for matrix, own in zip(gate_up, biases, strict=True))
        down = self._whole_stack(f"{prefix}down_proj", transposed=transposed)
        return gate, up, ExpertStack(down, self.optional(f"{prefix}down_proj_bias"))

    def _whole(self, name: str) -> Unpacking | None:
        return self._source.layout.made.get(self._names.get(name, ""))

    def _pair(self, name: str, *, transposed: bool) -> tuple[Matrix, Matrix]:
        """Return gates and ups of a tensor with both."""
        whole = self._whole(name)
        if isinstance(whole, JoinedRows | Composed):
            gate, up = (self._coded(one) for one in whole.wholes)
            return gate, up
        if isinstance(whole, TurnedFloats):
            both = self._coded(whole)
            return evaluated(both.outputs(slice(0, None, 2))), evaluated(both.outputs(slice(1, None, 2)))
        plain = self.plain(name)
        if transposed:
            return PlainMatrix(_turned(plain[..., 0::2])), PlainMatrix(_turned(plain[..., 1::2]))
        gates, ups = plain.split(2, axis=1)
        return PlainMatrix(gates), PlainMatrix(ups)

    def _whole_stack(self, name: str, *, transposed: bool) -> Matrix:
        whole = self._whole(name)
        if isinstance(whole, Composed):
            return self._coded(whole.wholes[0])
        if whole is not None:
            return self._coded(whole)
        return PlainMatrix(_turned(self.plain(name)) if transposed else self.plain(name))

    def _stack(self, prefix: str, part: str) -> Matrix:
        """Return the matrices ``part`` of all single experts. Raises ModelError if their forms differ."""
        found: list[Matrix] = []
        while not found or self.has(f"{prefix}{len(found)}.{part}_proj.weight"):
            found.append(self.matrix(f"{prefix}{len(found)}.{part}_proj"))
        if len({(type(one), *(array.shape for array in one.arrays)) for one in found}) > 1:
            raise ModelError(f"{self._source.name}: {prefix}*.{part}_proj differ in form", hint=ON_CPU)
        if isinstance(found[0], PlainMatrix):
            whole = mx.stack([one.arrays[0] for one in found])
            mx.eval(whole)
            return PlainMatrix(whole)
        return stacked([one for one in found if isinstance(one, CodedMatrix)])

    def _coded(self, whole: Unpacking) -> CodedMatrix:
        if not isinstance(whole, AffineRows | TurnedFloats | FloatCodes):
            return self._laid_out(whole)
        parts = {role: to_mlx(map_tensor(part)) for role, part in whole.parts.items()}
        if isinstance(whole, AffineRows):
            scales, biases = (self._scale(parts[role]) for role in ("scales", "biases"))
            found = CodedMatrix(parts["weight"], scales, biases, whole.group_size, whole.bits, "affine")
        elif isinstance(whole, TurnedFloats):
            found = _small_floats(parts["blocks"].flatten(-2), parts["scales"], whole)
        else:
            found = _small_floats(parts["weight"], parts["scales"], whole)
        self._count(found.arrays, sum(part.num_bytes for part in whole.parts.values()))
        return found

    def _laid_out(self, whole: Unpacking) -> CodedMatrix:
        """Return a matrix or a stack of another format in MLX's form.

        Raises ModelError for groups that are no runs of inputs, where the settings say that they are.
        """
        stored = whole.kept({role: map_tensor(part) for role, part in whole.parts.items()})
        matrices = stored.matrices if isinstance(stored, StoredStack) else (stored,)
        found = []
        for matrix in matrices:
            assert isinstance(matrix, StoredMatrix), "`check_supported` was not asked"
            (only,) = matrix.ranges
            assert isinstance(only, StoredRange), "only joined matrices defer a range"
            if PLACES in only.parts:
                raise ModelError(f"{whole.name} has groups that are no runs of inputs", hint=ON_CPU)
            found.append(lay_out(only, self.dtype))
        coded = found[0] if isinstance(stored, StoredMatrix) else stacked(found)
        self._count(coded.arrays, sum(part.num_bytes for part in whole.parts.values()))
        return coded

    def _scale(self, stored: mx.array) -> mx.array:
        """Return scales so that no product rounds them, and none converts them if that can be avoided."""
        return stored.astype(mx.float32) if self.dtype == mx.float32 else stored

    def _count(self, arrays: list[mx.array], num_bytes: int) -> None:
        # Evaluated at once, so that only one tensor exists twice.
        mx.eval(*arrays)
        self.bytes_read += num_bytes
        if self._progress is not None:
            self._progress(self.bytes_read, self._total)


def _small_floats(codes: mx.array, scales: mx.array, whole: Unpacking) -> CodedMatrix:
    """Return a matrix or a stack of small floats. Raises ModelError for a scale that is not a number."""
    mode, scales = _MODES[type(whole)], scales.view(mx.uint8)
    if bool(mx.any((scales & mode.nan) == mode.nan)):
        stored = whole.parts["scales"]
        raise ModelError(f"{stored.path}: {stored.name} holds a scale that is not a number")
    return CodedMatrix(codes.view(mx.uint32), scales, None, mode.group, mode.bits, mode.name)


def stacked(matrices: Sequence[CodedMatrix]) -> CodedMatrix:
    """Return single experts of one form as a stack. One stack at a time exists twice."""
    arrays = [mx.stack(list(own)) for own in zip(*(one.arrays for one in matrices), strict=True)]
    mx.eval(*arrays)
    codes, scales, *biases = arrays
    return replace(matrices[0], codes=codes, scales=scales, biases=biases[0] if biases else None)


def _turned(stack: mx.array) -> mx.array:
    """Return [experts, inputs, outputs] as [experts, outputs, inputs]."""
    found = mx.contiguous(stack.swapaxes(1, 2))
    mx.eval(found)
    return found
