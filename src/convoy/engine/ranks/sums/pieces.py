"""Tensors in pieces that fit one sealed record each: no rank makes another take more memory at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from convoy.errors import CollectiveError
from convoy.wire.frame import RECORD_BYTES
from convoy.wire.tensor import DESCRIPTOR_BYTES, MAX_DIMENSIONS, WireTensor

# Also of bfloat16, because sums in transit are float32.
PIECE_ELEMENTS = (RECORD_BYTES - DESCRIPTOR_BYTES) // 4

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(x: torch.Tensor) -> str:
    """Return the dtype's name on the wire. Raises `CollectiveError` for a dtype that no collective adds."""
    name = _NAMES.get(x.dtype)
    if name is None:
        raise CollectiveError(f"a collective adds float32 or bfloat16, and was given {x.dtype}")
    return name


def piece_shapes(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of a tensor's pieces: itself, whole rows, or elements of rows above a record."""
    num_elements = 1
    for size in shape:
        num_elements *= size
    if num_elements <= PIECE_ELEMENTS and len(shape) <= MAX_DIMENSIONS:
        return [tuple(shape)]
    width = shape[-1]
    if width > PIECE_ELEMENTS:
        starts = range(0, num_elements, PIECE_ELEMENTS)
        return [(min(PIECE_ELEMENTS, num_elements - start),) for start in starts]
    num_rows, at_once = num_elements // width, PIECE_ELEMENTS // width
    return [(min(at_once, num_rows - start), width) for start in range(0, num_rows, at_once)]


def cut(x: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Split the contiguous ``x`` into pieces of these shapes that share its memory."""
    if len(shapes) == 1:
        return [x.view(shapes[0])]
    flat = x.view(-1)
    pieces, start = [], 0
    for shape in shapes:
        size = shape[0] * (shape[1] if len(shape) == 2 else 1)
        pieces.append(flat[start : start + size].view(shape))
        start += size
    return pieces


def to_piece(x: torch.Tensor) -> WireTensor:
    """Convert a contiguous tensor of the host to its wire form; it shares the memory."""
    if x.numel() == 0:
        return WireTensor(_NAMES[x.dtype], tuple(x.shape), b"")
    raw = x if x.dtype is torch.float32 else x.view(torch.int16)
    return WireTensor(_NAMES[x.dtype], tuple(x.shape), raw.numpy().data.cast("B"))


def from_piece(tensor: WireTensor) -> torch.Tensor:
    """Convert a received piece to a tensor over the same memory."""
    dtype = _DTYPES[tensor.dtype]
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=dtype).view(tensor.shape)


def add_in_order(parts: Iterable[torch.Tensor], out: torch.Tensor) -> None:
    """Write ((p0 + p1) + p2) + ... in float32 to ``out``, rounded once if ``out`` is bfloat16."""
    ordered = iter(parts)
    first = next(ordered)
    if out.dtype is torch.float32:
        second = next(ordered)
        torch.add(first, second, out=out)
        for part in ordered:
            out.add_(part)
        return
    total = first.float()
    for part in ordered:
        total = total + part.float()
    out.copy_(total)
