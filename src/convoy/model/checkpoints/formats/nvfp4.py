"""Unpack NVFP4: 4-bit floats with an 8-bit scale for 16 of a row, and one factor for the whole matrix.

llm-compressor stores ``weight_packed`` beside ``weight_scale`` and divides scales by ``weight_global_scale``.
ModelOpt stores ``weight`` beside them and multiplies scales by ``weight_scale_2``. Either way a scale is
rounded once with its factor, and then a value once with its scale.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class GroupedFloats(Unpacking):
    """Unpack ``weight`` [rows, inputs / 2] with ``scales`` [rows, inputs / 16] and one ``factor``."""

    # whether scales are divided by the factor
    divides: bool

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows. Raises ModelError for a factor or a scale that is not a number."""
        import torch

        num_rows, width = self.shape
        factor = self._factor(parts)
        for rows in self.row_slices(num_rows, width):
            scales = parts["scales"][rows].to(torch.float32)
            if not bool(torch.isfinite(scales).all()):
                raise self._wrong("scales")
            scales = scales / factor if self.divides else scales * factor
            values = pairs_of_floats(parts["weight"][rows]).view(-1, width // _GROUP, _GROUP)
            yield (rows,), (values * scales.unsqueeze(-1)).flatten(1)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of codes and scales, and of a table of the scales' values."""
        return self.row_bytes + _TABLE_BYTES

    @property
    def row_bytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.parts["weight"].num_bytes + self.parts["scales"].num_bytes

    @property
    def kept_form(self) -> str:
        """Return the name of the form."""
        return "NVFP4"

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix, with the values of scales under the factor for each byte.

        Raises ModelError for a factor or a scale that is not a number.
        """
        import torch

        from convoy.model.kernels.stored.matrix import SCALE_VALUES, StoredMatrix, StoredRange

        num_rows, width = self.shape
        factor = self._factor(parts)
        scales = parts["scales"].view(torch.uint8)
        if bool((scales.bitwise_and(_E4M3_NAN) == _E4M3_NAN).any()):
            raise self._wrong("scales")
        every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        values = every / factor if self.divides else every * factor
        found = {"codes": parts["weight"], "scales": scales, SCALE_VALUES: values}
        return StoredMatrix((StoredRange(self.kept_form, num_rows, width, found, _GROUP),))

    def _factor(self, parts: Parts) -> torch.Tensor:
        import torch

        factor = parts["factor"].to(torch.float32).reshape(())
        if not bool(torch.isfinite(factor)) or not bool(factor):
            raise self._wrong("factor")
        return factor

    def _wrong(self, role: str) -> ModelError:
        stored = self.parts[role]
        return ModelError(f"{stored.path}: {stored.name} holds a scale that is not a number above 0")


def grouped_floats(
    name: str, weight: StoredTensor, scales: StoredTensor, factor: StoredTensor, *, divides: bool
) -> GroupedFloats:
    """Describe one matrix. Raises ModelError naming tensors that do not fit together."""
    require_rank(require(weight, _BYTES), 2)
    num_rows, width = weight.shape[0], 2 * weight.shape[1]
    if width % _GROUP:
        raise ModelError(
            f"{weight.path}: {weight.name} has rows of {width} numbers, expected a multiple of {_GROUP}"
        )
    parts = {
        "weight": weight,
        "scales": require(scales, _SCALES, (num_rows, width // _GROUP)),
        "factor": require(factor, ("F32",), (1,), ()),
    }
    return GroupedFloats(name, (num_rows, width), parts, divides)


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
