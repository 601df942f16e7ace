"""Define how several stored tensors make one tensor of the model.

The description needs the headers and the configuration alone. Tensors that do not fit together are refused,
by file and name, before a weight is read. Torch is imported only by `pieces`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convoy.config.kernels import card_bytes
from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.names import decoder_name, is_matrix

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.weights import Stored

Index = tuple[slice | int, ...]
Parts = Mapping[str, "torch.Tensor"]
FLOATS = ("F32", "BF16", "F16")
# plain numbers of two bytes, which widen to float32 without rounding
_HALVES = ("BF16", "F16")
# numbers unpacked at a time: 16 MiB of float32, and a few times that for intermediate values
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Unpacking:
    """Describe one tensor and its stored ``parts``, by role.

    ``dtype`` is torch's name of the dtype to which the values are rounded.
    """

    # the name in a checkpoint that is not quantised
    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    dtype: str = field(default="float32", kw_only=True)
    # numbers unpacked at a time
    piece_elements: int = field(default=_PIECE_ELEMENTS, kw_only=True)

    def row_slices(self, num_rows: int, width: int, step: int = 1) -> Iterator[slice]:
        """Yield consecutive slices of rows of ``width`` to unpack at a time.

        Each has a multiple of ``step`` rows, except the last.
        """
        at_once = max(1, self.piece_elements // max(1, width * step)) * step
        for start in range(0, num_rows, at_once):
            yield slice(start, min(start + at_once, num_rows))

    @abstractmethod
    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield float values and their place in the whole tensor, from the stored ``parts`` on any device.

        Raises ModelError for invalid values.
        """

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of `kept`, which headers alone tell; 0 where there is no such form."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Return the part of `kept_bytes` that belongs to rows, and not to tables for all of them."""
        return self.kept_bytes

    @property
    def kept_form(self) -> str:
        """Return the name of the form of a matrix's `kept`; "" for none, or for more than one."""
        return ""

    @property
    def kept_group(self) -> int:
        """Return the inputs that share a scale in `kept`, or 0 for all of an output; 1 where unknown."""
        return 1

    @property
    def kept_block(self) -> int:
        """Return the inputs of a block of `kept`, which no cut divides."""
        return 1

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix or the stack of matrices over ``parts``, without unpacking its values.

        Returns None where `kept_bytes` is 0. Raises ModelError for invalid parts.
        """
        del parts
        return None


@dataclass(frozen=True)
class JoinedRows(Unpacking):
    """Join several tensors along their rows."""

    wholes: tuple[Unpacking, ...]

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield the pieces of each tensor in turn."""
        start = 0
        for number, whole in enumerate(self.wholes):
            own = {role: parts[f"{number}.{role}"] for role in whole.parts}
            for index, values in whole.pieces(own):
                rows = index[-1]
                assert isinstance(rows, slice)
                yield (*index[:-1], slice(rows.start + start, rows.stop + start)), values
            start += whole.shape[-2]

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all tensors if each can be kept."""
        each = [whole.kept_bytes for whole in self.wholes]
        return sum(each) if all(each) else 0

    def kept(self, parts: Parts) -> Stored | None:
        """Return the stacks joined expert by expert."""
        from convoy.model.kernels.stored.matrix import StoredMatrix
        from convoy.model.kernels.stored.weights import StoredStack

        stacks = []
        for number, whole in enumerate(self.wholes):
            stack = whole.kept({role: parts[f"{number}.{role}"] for role in whole.parts})
            assert isinstance(stack, StoredStack), "only stacks of experts are joined"
            stacks.append(stack.matrices)
        return StoredStack(tuple(StoredMatrix.joined(one) for one in zip(*stacks, strict=True)))


def joined_rows(name: str, wholes: Sequence[Unpacking]) -> JoinedRows:
    """Describe the tensor ``name`` of ``wholes``, which have the same shape except for their rows."""
    parts = {f"{i}.{role}": part for i, one in enumerate(wholes) for role, part in one.parts.items()}
    *lead, _, width = wholes[0].shape
    return JoinedRows(name, (*lead, sum(one.shape[-2] for one in wholes), width), parts, tuple(wholes))


@dataclass(frozen=True)
class StoredLayout:
    """Describe how stored tensors make the model's. Tensors in neither field are used as they are stored."""

    # unpacked tensors, by their name in the model
    made: Mapping[str, Unpacking] = field(default_factory=dict)
    # names of stored tensors that are not used, such as scales of activations
    unused: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        wholes = {part.name: whole.name for whole in self.made.values() for part in whole.parts.values()}
        object.__setattr__(self, "_wholes", wholes)

    _wholes: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def whole(self, stored: str) -> str:
        """Return the tensor of the model that a stored one is, or is part of."""
        return self._wholes.get(stored, stored)

    def shapes(self, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's tensors, unpacked."""
        plain = {n: t.shape for n, t in tensors.items() if n not in self._wholes and n not in self.unused}
        return plain | {name: whole.shape for name, whole in self.made.items()}

    def kept(self, tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
        """Return the bytes of the matrices that exact mode keeps in the form of their file.

        The names are those in the decoder. Float32 is the form that it multiplies, and not among them.
        """
        found = {
            decoder_name(name): tensor.num_bytes
            for name, tensor in tensors.items()
            if tensor.dtype in _HALVES
            and name not in self._wholes
            and name not in self.unused
            and is_matrix(decoder_name(name), tensor.shape)
        }
        for name, whole in self.made.items():
            if is_matrix(decoder_name(name), whole.shape):
                found[decoder_name(name)] = whole.kept_bytes
        return {name: num_bytes for name, num_bytes in found.items() if num_bytes}

    def kept_on_card(self) -> dict[str, int]:
        """Return the bytes that matrices take on a CUDA device which keeps their codes and scales.

        The names are those in the decoder. All other matrices are unpacked there.
        """
        found = {}
        for name, whole in self.made.items():
            own = decoder_name(name)
            if len(whole.shape) == 2 and is_matrix(own, whole.shape):
                elements, inputs = whole.shape[0] * whole.shape[1], whole.shape[1]
                found[own] = card_bytes(whole.kept_form, elements, inputs, whole.row_bytes)
        return {name: num_bytes for name, num_bytes in found.items() if num_bytes}

    @property
    def rounded(self) -> set[str]:
        """Return the names, in the decoder, of the matrices that the file has in codes and not in floats."""
        return {
            decoder_name(name)
            for name, whole in self.made.items()
            if is_matrix(decoder_name(name), whole.shape)
            and any(part.dtype not in FLOATS for part in whole.parts.values())
        }


Describe = Callable[[Mapping[str, StoredTensor]], StoredLayout]


def part_of(tensors: Mapping[str, StoredTensor], name: str, beside: str) -> StoredTensor:
    """Return a tensor that ``beside`` needs. Raises ModelError if it is missing."""
    found = tensors.get(name)
    if found is None:
        raise ModelError(
            f"{tensors[beside].path}: {beside} is quantised, and there is no {name} for it",
            hint="a shard is missing or the conversion was not finished",
        )
    return found


def require(tensor: StoredTensor, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
    """Return ``tensor`` if its dtype and shape are among those given. Raises ModelError naming file and
    tensor.
    """
    if tensor.dtype not in dtypes:
        raise ModelError(
            f"{tensor.path}: {tensor.name} has the dtype {tensor.dtype}, expected {' or '.join(dtypes)}"
        )
    if shapes and tensor.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ModelError(
            f"{tensor.path}: {tensor.name} has the shape {list(tensor.shape)}, expected {expected}"
        )
    return tensor


def require_rank(tensor: StoredTensor, *ranks: int) -> StoredTensor:
    """Return ``tensor`` if it has one of ``ranks`` dimensions, and none is 0. Raises ModelError if not."""
    if len(tensor.shape) not in ranks or 0 in tensor.shape:
        expected = " or ".join(map(str, ranks))
        raise ModelError(
            f"{tensor.path}: {tensor.name} has the shape {list(tensor.shape)}, expected {expected} dimensions"
        )
    return tensor
