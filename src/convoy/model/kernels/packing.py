"""Pack a float32 matrix in the layout that oneDNN picks for it, from slices of outputs.

A large matrix packed at once would exist twice in float32. For `lm_head` of a large vocabulary that is
more than all other memory of a stage while it loads. The whole layout is therefore made over memory that
was never written, which costs nothing, and slices are packed and copied to their places. oneDNN's own
descriptions of both show that the slices have such places: they may differ in the number of outputs, and
in nothing else.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

import torch

# The number of rows that the layout is chosen for. Any value gives right results; this one was measured.
_PACK_ROWS = 256
# Bytes in float32. Smaller matrices are packed at once.
_LARGE = 64 << 20
_SLICE = 16 << 20
# A multiple of the number of outputs that any layout keeps together.
_PANEL = 64


def pack_float32(
    weight: torch.Tensor, *, large_bytes: int = _LARGE, slice_bytes: int = _SLICE
) -> torch.Tensor:
    """Return a matrix [out, in] of any floating-point type, packed.

    A matrix of another type with ``large_bytes`` in float32 is converted to it one slice of ``slice_bytes``
    at a time.
    """
    weight = weight.detach()
    lies_ready = weight.dtype == torch.float32 and weight.is_contiguous()
    if not lies_ready and 4 * weight.numel() >= large_bytes:
        packed = _joined(weight, slice_bytes)
        if packed is not None:
            return packed
    return _pack(weight.to(torch.float32).contiguous())


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def _joined(weight: torch.Tensor, slice_bytes: int) -> torch.Tensor | None:
    """Return the matrix packed from slices, or None where slices have no places of their own in the whole."""
    mkldnn = torch.ops.mkldnn
    if not all(hasattr(mkldnn, name) for name in ("data_ptr", "_nbytes", "_get_mkldnn_serialized_md")):
        return None
    # Memory that was never written has no pages yet, so this packing costs almost none.
    whole = _pack(torch.empty(weight.shape))
    start, size = mkldnn.data_ptr(whole), mkldnn._nbytes(whole)
    filled = 0
    for rows in _slices(weight.shape[0], weight.shape[1], slice_bytes):
        part = _pack(weight[rows].to(torch.float32).contiguous())
        num_bytes = mkldnn._nbytes(part)
        if not has_place(part, whole) or filled + num_bytes > size:
            return None
        ctypes.memmove(start + filled, mkldnn.data_ptr(part), num_bytes)
        filled += num_bytes
    return whole if filled == size else None


def _slices(outputs: int, inputs: int, slice_bytes: int) -> Iterator[slice]:
    """Yield slices of whole panels.

    The last slice includes the rest, since few outputs may have another layout.
    """
    step = max(1, slice_bytes // (4 * inputs * _PANEL)) * _PANEL
    last = max(1, outputs // step) - 1
    for number in range(last + 1):
        yield slice(number * step, outputs if number == last else (number + 1) * step)


def has_place(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether outputs lie outermost in both layouts, in equal blocks, so that strides are equal."""
    ours, others = (_described(packed) for packed in (part, whole))
    differing = [pair for pair in zip(ours, others, strict=True) if pair[0] != pair[1]]
    # The two numbers that may differ: the outputs, and the outputs padded to whole blocks.
    if not differing:
        return True
    return len(differing) == 2 and differing[0] == (part.shape[0], whole.shape[0])


def _described(packed: torch.Tensor) -> tuple[int, ...]:
    raw = torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()
    return struct.unpack(f"={len(raw) // 4}i", raw[: len(raw) // 4 * 4])
