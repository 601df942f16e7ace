"""Unpack rows of ggml's blocks with the `gguf` package, which llama.cpp's authors publish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.gguf.header import TYPES
from convoy.model.checkpoints.formats.unpacking import Index, Parts, Unpacking

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.weights import Stored

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
_SIZES = {name: sizes for name, *sizes in TYPES.values()}


@dataclass(frozen=True)
class GgufRows(Unpacking):
    """Unpack ``stored``, bytes [..., rows, bytes of a row]; leading dimensions are experts.

    With ``turned_heads`` heads, the rows of each head's halves are interleaved, and are sorted here.
    """

    # ggml's number of the quantised type
    kind: int
    turned_heads: int | None = None

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows, expert by expert; whole heads at a time if their rows are reordered."""
        num_rows, width = self.shape[-2:]
        head_rows = num_rows // self.turned_heads if self.turned_heads else 1
        leads: list[tuple[int, ...]] = [()] if len(self.shape) == 2 else [(e,) for e in range(self.shape[0])]
        for lead in leads:
            for rows in self.row_slices(num_rows, width, head_rows):
                place: Index = (*lead, rows)
                values = unpack_blocks(parts["stored"][place], self.kind)
                if self.turned_heads:
                    values = values.view(-1, head_rows // 2, 2, width).transpose(1, 2).reshape(-1, width)
                yield place, values

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the rows. Float32 is not among the forms that are kept."""
        return 0 if self.kept_form == "F32" else self.parts["stored"].num_bytes

    @property
    def kept_block(self) -> int:
        """Return the inputs of a block of the type."""
        block: int = _SIZES[TYPES[self.kind][0]][0]
        return block

    @property
    def kept_form(self) -> str:
        """Return the type's name, with a prefix for types in blocks."""
        name = TYPES[self.kind][0]
        return name if name in _TORCH_NAMES else f"gguf:{name}"

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix over the blocks, with reordered rows sorted, or a stack of one for each expert.

        Raises ModelError without the package gguf.
        """
        import torch

        from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
        from convoy.model.kernels.stored.weights import StoredStack

        role, stored = "stored", parts["stored"]
        if self.kept_form in _TORCH_NAMES:
            role, stored = "values", stored.view(getattr(torch, _TORCH_NAMES[self.kept_form]))
        else:
            gguf_package()
        num_rows, width = self.shape[-2:]
        experts = stored.view(-1, num_rows, stored.shape[-1])
        each = [StoredMatrix((StoredRange(self.kept_form, num_rows, width, {role: one}),)) for one in experts]
        if len(self.shape) == 3:
            return StoredStack(tuple(each))
        if not self.turned_heads:
            return each[0]
        order = torch.arange(num_rows).view(self.turned_heads, -1, 2).transpose(1, 2)
        return each[0].rows(order.reshape(-1))


def gguf_rows(stored: StoredTensor, turned_heads: int | None = None) -> GgufRows:
    """Describe a matrix, or one for each expert. Raises ModelError for another shape."""
    num_rows = stored.shape[-2] if len(stored.shape) in (2, 3) else 0
    if not num_rows or num_rows % (2 * (turned_heads or 1)) * (turned_heads or 0):
        raise ModelError(
            f"{stored.path}: {stored.name} is {stored.dtype} of shape {list(stored.shape)}, expected a matrix"
            + (f" for {turned_heads} heads" if turned_heads else "")
        )
    return GgufRows(
        stored.name, stored.shape, {"stored": as_bytes(stored)}, _NUMBERS[stored.dtype], turned_heads
    )


def as_bytes(stored: StoredTensor) -> StoredTensor:
    """Return a tensor as bytes [..., bytes of a row]. Raises ModelError if its size does not fit its type."""
    block, block_bytes = _SIZES.get(stored.dtype, (0, 0))
    if not block or not stored.shape or stored.shape[-1] % block:
        raise ModelError(
            f"{stored.path}: {stored.name} is {stored.dtype} of shape {list(stored.shape)}, expected one of "
            f"ggml's types in rows of whole blocks"
        )
    row_bytes = stored.shape[-1] // block * block_bytes
    if stored.num_bytes != prod(stored.shape[:-1]) * row_bytes:
        raise ModelError(
            f"{stored.path}: {stored.name} has {stored.num_bytes} bytes, expected {stored.dtype} of shape "
            f"{list(stored.shape)}"
        )
    return replace(stored, dtype="U8", shape=(*stored.shape[:-1], row_bytes))


def unpack_blocks(packed: torch.Tensor, kind: int) -> torch.Tensor:
    """Return the float32 values of bytes [..., bytes of a row] in ggml's type ``kind``."""
    import torch

    package = gguf_package()
    found = package.quants.dequantize(packed.cpu().numpy(), package.GGMLQuantizationType(kind))
    return torch.from_numpy(found)


def gguf_package() -> Any:
    """Return the package that unpacks GGUF types. Raises ModelError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "weights in a GGUF file need the package gguf", hint="pip install 'WHEEL[gguf]'"
        ) from error
    return gguf
