"""Unpack MXFP4: blocks of 32 4-bit floats along a row, each with a power-of-two scale.

The format is in OCP Microscaling Formats 1.0. GPT-OSS stores its experts as ``NAME_blocks`` [experts, rows,
blocks, 16 bytes] beside ``NAME_scales``. The library's ``NAME`` is [experts, inputs, rows], so the unpacked
tensor is transposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
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

    from convoy.model.kernels.stored.matrix import StoredMatrix
    from convoy.model.kernels.stored.weights import Stored

# inputs under one power of two
MX_BLOCK = 32
# the magnitudes of E2M1; the highest bit is the sign
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# numbers in one element of a stored tensor
_PAIRS = {"U8": 2, "I8": 2, "U32": 8}
_EXPONENT_BIAS = 127
# the exponent that marks a NaN
_FORM = "MXFP4"
_NOT_A_NUMBER = 255


@dataclass(frozen=True)
class TurnedFloats(Unpacking):
    """Unpack [experts, inputs, rows] from blocks along the inputs."""

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield some rows of an expert at a time. Raises ModelError for a scale that is NaN."""
        blocks, scales = parts["blocks"], parts["scales"]
        num_experts, width, num_rows = self.shape
        for expert in range(num_experts):
            for rows in self.row_slices(num_rows, width):
                found = scaled_pairs(blocks[expert, rows], scales[expert, rows], self.parts["scales"])
                yield (expert, slice(None), rows), found.flatten(1).T

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of blocks and scales."""
        return sum(part.num_bytes for part in self.parts.values())

    def kept(self, parts: Parts) -> Stored | None:
        """Return a stack of [rows, inputs]. Raises ModelError for a scale that is NaN."""
        from convoy.model.kernels.stored.weights import StoredStack

        scales = _exponents(parts["scales"], self.parts["scales"])
        return StoredStack(tuple(map(_matrix, parts["blocks"].flatten(2), scales)))


@dataclass(frozen=True)
class RowFloats(Unpacking):
    """Unpack [..., rows, inputs] from pairs in bytes or words, with a scale for 32 inputs.

    Leading dimensions are experts.
    """

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows, expert by expert. Raises ModelError for a scale that is NaN."""
        import torch

        num_rows, width = self.shape[-2:]
        leads: list[tuple[int, ...]] = [()] if len(self.shape) == 2 else [(e,) for e in range(self.shape[0])]
        for lead in leads:
            for rows in self.row_slices(num_rows, width):
                place: Index = (*lead, rows)
                pairs = parts["weight"][place].contiguous().view(torch.uint8)
                blocks = pairs.view(-1, width // MX_BLOCK, MX_BLOCK // 2)
                found = scaled_pairs(blocks, parts["scales"][place], self.parts["scales"])
                yield place, found.flatten(1)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of pairs and scales."""
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def kept_form(self) -> str:
        """Return the name of the form."""
        return _FORM

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix, or a stack of one for each expert. Raises ModelError for a scale that is NaN."""
        import torch

        from convoy.model.kernels.stored.weights import StoredStack

        weight = parts["weight"]
        if weight.dtype == torch.uint32:
            # torch cannot index its unsigned words
            weight = weight.view(torch.int32)
        scales = _exponents(parts["scales"], self.parts["scales"])
        if len(self.shape) == 2:
            return _matrix(weight, scales)
        return StoredStack(tuple(map(_matrix, weight, scales)))


def _matrix(codes: torch.Tensor, scales: torch.Tensor) -> StoredMatrix:
    """Return a matrix [rows, inputs] of pairs [rows, words] and exponents [rows, blocks]."""
    from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange

    num_rows, num_blocks = scales.shape
    parts = {"codes": codes, "scales": scales}
    return StoredMatrix((StoredRange(_FORM, num_rows, num_blocks * MX_BLOCK, parts, MX_BLOCK),))


def row_floats(name: str, weight: StoredTensor, scales: StoredTensor) -> RowFloats:
    """Describe a matrix, or one for each expert. Raises ModelError naming tensors that do not fit."""
    return RowFloats(name, blocked_shape(weight, scales, _PAIRS), {"weight": weight, "scales": scales})


def blocked_shape(weight: StoredTensor, scales: StoredTensor, numbers: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape [..., rows, inputs] of floats with a scale for `MX_BLOCK` inputs.

    ``numbers`` has how many floats one element holds, by its type. Raises ModelError naming tensors that do
    not fit.
    """
    require_rank(require(weight, tuple(numbers)), 2, 3)
    *lead, num_words = weight.shape
    width = num_words * numbers[weight.dtype]
    if width % MX_BLOCK:
        raise ModelError(
            f"{weight.path}: {weight.name} has rows of {width} numbers, expected a multiple of {MX_BLOCK}"
        )
    require(scales, ("U8", "F8_E8M0"), (*lead, width // MX_BLOCK))
    return (*lead, width)


def scaled_pairs(blocks: torch.Tensor, scales: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return the values of blocks [..., 16 bytes] with their exponents [...], float32 [..., 32].

    Raises ModelError for a scale that is NaN, which ``stored`` names.
    """
    import torch

    powers = _exponents(scales, stored).to(torch.int32).unsqueeze(-1) - _EXPONENT_BIAS
    return torch.ldexp(pairs_of_floats(blocks), powers)


def _exponents(scales: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return the bytes of scales. Raises ModelError for a scale that is NaN, which ``stored`` names."""
    import torch

    exponents = scales.view(torch.uint8)
    if bool((exponents == _NOT_A_NUMBER).any()):
        raise ModelError(f"{stored.path}: {stored.name} holds a scale that is not a number")
    return exponents


def pairs_of_floats(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of E2M1 codes in bytes [..., n], float32 [..., 2 n]; low halves come first."""
    import torch

    values = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return values[codes.to(torch.int64)]


def describe_mxfp4(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe a checkpoint. Raises ModelError naming the tensors that do not fit together."""
    # the stored tensors show which modules are quantised
    del quantization
    made = {}
    for name, blocks in tensors.items():
        if not name.endswith("_blocks"):
            continue
        whole = name.removesuffix("_blocks")
        require_rank(require(blocks, ("U8",)), 4)
        num_experts, num_rows, num_blocks, num_bytes = blocks.shape
        require(blocks, ("U8",), (num_experts, num_rows, num_blocks, MX_BLOCK // 2))
        scales = part_of(tensors, f"{whole}_scales", name)
        require(scales, ("U8", "F8_E8M0"), blocks.shape[:-1])
        shape = (num_experts, num_blocks * 2 * num_bytes, num_rows)
        made[whole] = TurnedFloats(whole, shape, {"blocks": blocks, "scales": scales})
    return StoredLayout(made)
