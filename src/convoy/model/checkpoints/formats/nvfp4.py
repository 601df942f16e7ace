"""Unpack NVFP4: 4-bit floats with an 8-bit scale for 16 of a row, and one factor for the whole matrix.

llm-compressor stores ``weight_packed`` beside ``weight_scale`` and divides scales by ``weight_global_scale``.
ModelOpt stores ``weight`` beside them and multiplies scales by ``weight_scale_2``. Either way a scale is
rounded once with its factor, and then a value once with its scale. MLX has no factor, packs codes in words,
and stacks experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.fp8 import of_activations, scaled_floats
from convoy.model.checkpoints.formats.mxfp4 import pairs_of_floats
from convoy.model.checkpoints.formats.unpacking import (
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

_GROUP = 16
_E4M3_NAN = 0x7F
_TABLE_BYTES = 4 * 256
_SCALES = ("F8_E4M3",)
_BYTES = ("U8",)
# numbers in one element of a stored tensor
_PAIRS = {"U8": 2, "U32": 8}


@dataclass(frozen=True)
class GroupedFloats(Unpacking):
    """Unpack ``weight`` [..., rows, inputs] with ``scales`` [..., rows, inputs / 16], and ``factor`` if there
    is one.

    Leading dimensions are experts.
    """

    # whether scales are divided by the factor
    divides: bool

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows, expert by expert. Raises ModelError for a factor or a scale that is not a number."""
        weight, scale_bytes = self._bytes(parts)
        num_rows, width = self.shape[-2:]
        values = self._scale_values(parts)
        leads: list[tuple[int, ...]] = [()] if len(self.shape) == 2 else [(e,) for e in range(self.shape[0])]
        for lead in leads:
            for rows in self.row_slices(num_rows, width):
                place: Index = (*lead, rows)
                scales = values[scale_bytes[place].int()]
                found = pairs_of_floats(weight[place]).view(-1, width // _GROUP, _GROUP)
                yield place, (found * scales.unsqueeze(-1)).flatten(1)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of codes and scales, and of a table of the scales' values for each matrix."""
        return self.row_bytes + math.prod(self.shape[:-2]) * _TABLE_BYTES

    @property
    def row_bytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.parts["weight"].num_bytes + self.parts["scales"].num_bytes

    @property
    def kept_form(self) -> str:
        """Return the name of the form."""
        return "NVFP4"

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix, or a stack of one for each expert, with the values of scales for each byte.

        Raises ModelError for a factor or a scale that is not a number.
        """
        from convoy.model.kernels.stored.matrix import SCALE_VALUES, StoredMatrix, StoredRange
        from convoy.model.kernels.stored.weights import StoredStack

        num_rows, width = self.shape[-2:]
        weight, scales = self._bytes(parts)
        values = self._scale_values(parts)

        def matrix(codes: torch.Tensor, of_groups: torch.Tensor) -> StoredMatrix:
            found = {"codes": codes, "scales": of_groups, SCALE_VALUES: values}
            return StoredMatrix((StoredRange(self.kept_form, num_rows, width, found, _GROUP),))

        return (
            matrix(weight, scales)
            if len(self.shape) == 2
            else StoredStack(tuple(map(matrix, weight, scales)))
        )

    def _bytes(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pairs of codes and scales in bytes. Raises ModelError for a scale that is not a number."""
        import torch

        scales = parts["scales"].view(torch.uint8)
        if bool((scales.bitwise_and(_E4M3_NAN) == _E4M3_NAN).any()):
            raise self._wrong("scales")
        return parts["weight"].contiguous().view(torch.uint8), scales

    def _scale_values(self, parts: Parts) -> torch.Tensor:
        """Return the value of a scale for each byte, under the factor."""
        import torch

        every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        every = every.to(parts["scales"].device)
        if "factor" not in parts:
            return every
        factor = parts["factor"].to(torch.float32).reshape(())
        if not bool(torch.isfinite(factor)) or not bool(factor):
            raise self._wrong("factor")
        return every / factor if self.divides else every * factor

    def _wrong(self, role: str) -> ModelError:
        stored = self.parts[role]
        return ModelError(f"{stored.path}: {stored.name} holds a scale that is not a number above 0")


def grouped_floats(
    name: str,
    weight: StoredTensor,
    scales: StoredTensor,
    factor: StoredTensor | None,
    *,
    divides: bool = False,
) -> GroupedFloats:
    """Describe one matrix, or one for each expert. Raises ModelError naming tensors that do not fit."""
    require_rank(require(weight, tuple(_PAIRS)), 2, 3)
    *lead, num_words = weight.shape
    width = num_words * _PAIRS[weight.dtype]
    if width % _GROUP:
        raise ModelError(
            f"{weight.path}: {weight.name} has rows of {width} numbers, expected a multiple of {_GROUP}"
        )
    dtypes = _BYTES if factor is None else _SCALES
    parts = {"weight": weight, "scales": require(scales, dtypes, (*lead, width // _GROUP))}
    if factor is not None:
        parts["factor"] = require(factor, ("F32",), (1,), ())
    return GroupedFloats(name, (*lead, width), parts, divides)


def describe_modelopt(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe a checkpoint of ModelOpt. Raises ModelError naming settings or tensors that do not fit."""
    method = quantization.settings.get("quant_algo")
    if method not in ("NVFP4", "FP8"):
        raise quantization.wrong("quant_algo", "NVFP4 or FP8")
    made: dict[str, Unpacking] = {}
    for name, stored in tensors.items():
        scales = tensors.get(f"{name}_scale")
        if not name.endswith(".weight") or scales is None:
            continue
        if method == "NVFP4" and stored.dtype in _BYTES:
            factor = part_of(tensors, f"{name}_scale_2", name)
            made[name] = grouped_floats(name, stored, scales, factor, divides=False)
        else:
            made[name] = scaled_floats(name, tensors, None)
    return StoredLayout(made, of_activations(tensors))
