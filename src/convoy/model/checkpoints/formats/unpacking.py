"""A tensor of the model that several stored tensors make.

Described from the headers and the configuration alone, so that what does not fit together is refused, by file
and tensor, before a weight is read. Torch comes with `pieces`, when there is something to unpack.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor

if TYPE_CHECKING:
    import torch

Index = tuple[slice | int, ...]
Parts = Mapping[str, "torch.Tensor"]
FLOATS = ("F32", "BF16", "F16")
_PIECE_ELEMENTS = 1 << 22  # unpacked at a time: 16 MiB of float32, and a few times that beside it


@dataclass(frozen=True)
class Unpacking:
    """``parts`` by their role; ``dtype`` is torch's name of what the whole is rounded to."""

    name: str  # as a checkpoint that is not quantised has it
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    dtype: str = field(default="float32", kw_only=True)

    @abstractmethod
    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Float values, with their place in the whole, from the stored ``parts`` on any device.

        Raises ModelError for values that cannot be.
        """


@dataclass(frozen=True)
class StoredLayout:
    """What the stored tensors of a checkpoint make; those in neither field are the model's as they are."""

    made: Mapping[str, Unpacking] = field(default_factory=dict)  # by the name in the model
    unused: frozenset[str] = frozenset()  # stored, and of no use here: scales of activations

    def __post_init__(self) -> None:
        wholes = {part.name: whole.name for whole in self.made.values() for part in whole.parts.values()}
        object.__setattr__(self, "_wholes", wholes)

    _wholes: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def whole(self, stored: str) -> str:
        """The tensor of the model that a stored one is, or is part of."""
        return self._wholes.get(stored, stored)

    def shapes(self, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
        """Of the model's tensors, unpacked."""
        plain = {n: t.shape for n, t in tensors.items() if n not in self._wholes and n not in self.unused}
        return plain | {name: whole.shape for name, whole in self.made.items()}


Describe = Callable[[Mapping[str, StoredTensor]], StoredLayout]


def row_slices(num_rows: int, width: int, step: int = 1) -> Iterator[slice]:
    """Consecutive rows of ``width`` to unpack at a time, always a multiple of ``step`` but for the last."""
    at_once = max(1, _PIECE_ELEMENTS // max(1, width * step)) * step
    for start in range(0, num_rows, at_once):
        yield slice(start, min(start + at_once, num_rows))


def part_of(tensors: Mapping[str, StoredTensor], name: str, beside: str) -> StoredTensor:
    """A tensor that ``beside`` needs. Raises ModelError if it is not there."""
    found = tensors.get(name)
    if found is None:
        raise ModelError(
            f"{tensors[beside].path}: {beside} is quantised, and there is no {name} for it",
            hint="a shard is missing or the conversion was not finished",
        )
    return found


def require(tensor: StoredTensor, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
    """``tensor``, if it has one of these. Raises ModelError naming file and tensor, and what was expected."""
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
    """``tensor``, if it has one of so many dimensions, none of them 0. Raises ModelError naming both."""
    if len(tensor.shape) not in ranks or 0 in tensor.shape:
        expected = " or ".join(map(str, ranks))
        raise ModelError(
            f"{tensor.path}: {tensor.name} has the shape {list(tensor.shape)}, expected {expected} dimensions"
        )
    return tensor
