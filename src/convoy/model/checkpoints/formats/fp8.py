"""Unpack 8-bit floats with a scale per square (DeepSeek, Qwen), per row, or per matrix.

``NAME`` in float8_e4m3fn lies beside ``NAME_scale`` or ``NAME_scale_inv``. Values are multiplied by either
one, in spite of the second name. DeepSeek V4 has ``X.scale`` beside ``X.weight``, and its experts are 4-bit
floats. Scales of activations are not used: activations are not quantised here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.grid import GridScaled
from convoy.model.checkpoints.formats.mxfp4 import MX_BLOCK, blocked_shape, row_floats
from convoy.model.checkpoints.formats.unpacking import (
    FLOATS,
    Index,
    Parts,
    StoredLayout,
    Unpacking,
    part_of,
    require,
    require_rank,
)
from convoy.plan.spec.quantization import Quantization

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.weights import Stored

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
# pairs of 4-bit floats
_FLOAT4 = ("I8", "U8")
_WEIGHT = ".weight"
_MAX_BLOCK = 1 << 16
# the 8-bit floats in an element of a stored tensor
_MX_FLOATS = {"F8_E4M3": 1, "U32": 4}
_OF_ACTIVATIONS = (
    *(".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale"),
    *(".input_global_scale", ".input_scale_ub", ".input_zero_point", ".output_zero_point"),
)


@dataclass(frozen=True)
class WordFloats(GridScaled):
    """Unpack MXFP8: 8-bit floats, plain or in words, with a power of two in a byte for 32 inputs."""

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows, expert by expert."""
        yield from super().pieces(_as_floats(parts))

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix or the stack, with scales in bfloat16, which is exact."""
        return super().kept(_as_floats(parts))

    @property
    def _form(self) -> str:
        return _FLOAT8[0]


def _as_floats(parts: Parts) -> dict[str, torch.Tensor]:
    import torch

    return {
        "weight": parts["weight"].contiguous().view(torch.float8_e4m3fn),
        "scales": parts["scales"].contiguous().view(torch.float8_e8m0fnu),
    }


def word_floats(name: str, weight: StoredTensor, scales: StoredTensor) -> WordFloats:
    """Describe a matrix of MXFP8, or one for each expert. Raises ModelError for tensors that do not fit."""
    shape = blocked_shape(weight, scales, _MX_FLOATS)
    return WordFloats(name, shape, {"weight": weight, "scales": scales}, (1, MX_BLOCK))


def describe_fp8(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe a checkpoint. Raises ModelError naming the settings or tensors that do not fit together."""
    block = _block(quantization)
    made = {name: scaled_floats(name, tensors, block) for name, t in tensors.items() if t.dtype in _FLOAT8}
    for name, weight in tensors.items():
        scales = tensors.get(_beside(name))
        if weight.dtype in _FLOAT4 and name.endswith(_WEIGHT) and scales is not None:
            made[name] = row_floats(name, weight, scales)
    return StoredLayout(made, of_activations(tensors))


def of_activations(tensors: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Return the names of the tensors that are stored for activations."""
    return frozenset(name for name in tensors if name.endswith(_OF_ACTIVATIONS))


def scaled_floats(name: str, tensors: Mapping[str, StoredTensor], block: tuple[int, int] | None) -> Unpacking:
    """Describe one matrix and its scales. Raises ModelError if scales are missing or do not fit ``block``."""
    weight = require_rank(tensors[name], 2, 3)
    inverse = f"{name}_scale_inv"
    found = next((one for one in (inverse, _beside(name)) if one in tensors), f"{name}_scale")
    scales = part_of(tensors, found, name)
    *lead, num_rows, width = weight.shape
    tile = block
    if tile is not None:
        grid = (*lead, -(-num_rows // tile[0]), -(-width // tile[1]))
        require(scales, (*FLOATS, "F8_E8M0"), grid)
    else:
        per_row, alike = (*lead, num_rows, 1), (*lead, 1, 1)
        require(scales, FLOATS, per_row, per_row[:-1], alike, *([] if lead else [(1,), ()]))
        tile = (1 if math.prod(scales.shape) == math.prod(per_row) else num_rows, width)
    return GridScaled(name, weight.shape, {"weight": weight, "scales": scales}, tile)


def _beside(name: str) -> str:
    """Return the name of DeepSeek V4's scales of a matrix."""
    return f"{name.removesuffix(_WEIGHT)}.scale"


def _block(quantization: Quantization) -> tuple[int, int] | None:
    found = quantization.settings.get("weight_block_size")
    if found is None:
        return None
    sizes = list(found) if isinstance(found, list | tuple) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= _MAX_BLOCK for size in sizes):
        raise quantization.wrong("weight_block_size", f"two whole numbers from 1 to {_MAX_BLOCK}")
    return sizes[0], sizes[1]
