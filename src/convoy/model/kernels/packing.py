"""A float32 matrix in the layout that oneDNN picks for it, made of slices of outputs.

Packed at once, a large matrix would be there twice in float32: `lm_head` of a large vocabulary more than all
else that a stage takes while it loads. So the whole layout is made over memory that nobody has written to,
which takes none, and slices are packed and copied to their places. That they have such places is read from
oneDNN's own descriptions of both: they may differ in the number of outputs, and in nothing else.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

import torch

_PACK_ROWS = 256  # that the layout is chosen for; any value gives right results, this one was measured
_LARGE = 64 << 20  # bytes in float32; smaller ones are packed at once
_SLICE = 16 << 20
_PANEL = 64  # outputs that a layout keeps together divide this


def pack_float32(weight: torch.Tensor) -> torch.Tensor:
    """A matrix [out, in] of any floating-point type, packed.

    What it was made of is there in float32 a slice at a time, where the matrix is large.
    """
    weight = weight.detach()
    lies_ready = weight.dtype == torch.float32 and weight.is_contiguous()
    if not lies_ready and 4 * weight.numel() >= _LARGE:
        packed = _joined(weight)
        if packed is not None:
            return packed
    return _pack(weight.to(torch.float32).contiguous())


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def _joined(weight: torch.Tensor) -> torch.Tensor | None:
    """None where slices have no places of their own in the whole."""
    mkldnn = torch.ops.mkldnn
    if not all(hasattr(mkldnn, name) for name in ("data_ptr", "_nbytes", "_get_mkldnn_serialized_md")):
        return None
    whole = _pack(torch.empty(weight.shape))
    start, size = mkldnn.data_ptr(whole), mkldnn._nbytes(whole)
    filled = 0
    for rows in _slices(*weight.shape):
        part = _pack(weight[rows].to(torch.float32).contiguous())
        num_bytes = mkldnn._nbytes(part)
        if not _has_place(part, whole) or filled + num_bytes > size:
            return None
        ctypes.memmove(start + filled, mkldnn.data_ptr(part), num_bytes)
        filled += num_bytes
    return whole if filled == size else None


def _slices(outputs: int, inputs: int) -> Iterator[slice]:
    """Of whole panels; the last has what is left besides, since few outputs may be laid out otherwise."""
    step = max(1, _SLICE // (4 * inputs * _PANEL)) * _PANEL
    last = max(1, outputs // step) - 1
    for number in range(last + 1):
        yield slice(number * step, outputs if number == last else (number + 1) * step)


def _has_place(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether outputs lie outermost in both, in the same blocks: all strides are the same then."""
    ours, others = (_described(packed) for packed in (part, whole))
    differing = [pair for pair in zip(ours, others, strict=True) if pair[0] != pair[1]]
    # how many outputs there are, and how many with those that fill a block up
    if not differing:
        return True
    return len(differing) == 2 and differing[0] == (part.shape[0], whole.shape[0])


def _described(packed: torch.Tensor) -> tuple[int, ...]:
    raw = torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()
    return struct.unpack(f"={len(raw) // 4}i", raw[: len(raw) // 4 * 4])
