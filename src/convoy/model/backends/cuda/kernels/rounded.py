"""Round matrices to 8 or 4 bits while they are loaded. Activations stay in bfloat16.

With 8 bits the rounding is symmetric, with a float32 scale for each output. With 4 bits each group of 64
inputs of an output has a scale and a least value in bfloat16, so a weight takes 4.5 bits. `lm_head`, and
matrices with a number of inputs that is not a multiple of 64, are rounded to 8 bits. A byte holds two
numbers, 32 inputs apart, so that both halves of a group are runs of inputs. A decode gains because it
reads so much less: products and sums are those of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GROUP = 64
_HALF = GROUP // 2
_GREATEST = {8: 127, 4: 15}
# Rows rounded at a time. Float copies of a whole matrix would be the peak of loading.
_ROUNDED_ROWS = 8192


@dataclass(frozen=True)
class DeviceMatrix:
    """Hold a rounded matrix.

    With 8 bits, ``numbers`` is int8 [outputs, inputs] and ``scales`` float32 [outputs]. With 4 bits they
    are uint8 [outputs, inputs / 2] and bfloat16 [outputs, inputs / 64, 2]: a weight is its number times
    the scale, plus the least value.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        outputs, width = self.numbers.shape
        return outputs, width * 8 // self.bits

    def words(self) -> torch.Tensor | None:
        """Return ``numbers`` as int32, four bytes each.

        Return None where a row does not end at a whole word.
        """
        return self.numbers.view(torch.int32) if self.numbers.shape[1] % 4 == 0 else None

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def numel(self) -> int:
        """Return the number of weights."""
        outputs, inputs = self.shape
        return outputs * inputs

    def dense(self) -> torch.Tensor:
        """Return the weights as float32 [outputs, inputs], slowly. The kernels multiply with these values."""
        if self.bits == 8:
            return self.numbers.float() * self.scales[:, None]
        outputs, inputs = self.shape
        packed = self.numbers.view(outputs, -1, _HALF)
        both = torch.cat((packed & 15, packed >> 4), dim=-1).float()
        scale, least = self.scales.float().unsqueeze(-1).unbind(2)
        return (both * scale + least).view(outputs, inputs)


Matrix = torch.Tensor | DeviceMatrix


def round_matrix(weight: torch.Tensor, bits: int) -> DeviceMatrix:
    """Round [outputs, inputs] on its device. 4 bits need a multiple of 64 inputs, else 8 bits are used."""
    outputs, inputs = weight.shape
    if bits == 4 and inputs % GROUP:
        bits = 8
    device = weight.device
    if bits == 8:
        numbers = torch.empty(outputs, inputs, dtype=torch.int8, device=device)
        scales = torch.empty(outputs, dtype=torch.float32, device=device)
        rounded: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = _to_8_bits
    else:
        numbers = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(outputs, inputs // GROUP, 2, dtype=torch.bfloat16, device=device)
        rounded = _to_4_bits
    for start in range(0, outputs, _ROUNDED_ROWS):
        rows = slice(start, start + _ROUNDED_ROWS)
        numbers[rows], scales[rows] = rounded(weight[rows].float())
    return DeviceMatrix(numbers, scales, bits)


def _to_8_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rows.abs().amax(-1, keepdim=True) / _GREATEST[8]
    # A row of zeros has scale 0, and 0 / 0 is NaN.
    numbers = (rows / scale).round_().nan_to_num_(0.0, 0.0, 0.0)
    return numbers.to(torch.int8), scale[:, 0]


def _to_4_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = rows.view(len(rows), -1, GROUP)
    lowest, highest = groups.amin(-1), groups.amax(-1)
    scales = torch.stack(((highest - lowest) / _GREATEST[4], lowest), dim=-1).to(torch.bfloat16)
    scale, least = scales.float().unsqueeze(-1).unbind(2)
    # A group of equal weights has scale 0: all its numbers become 0, which stands for the least value.
    numbers = ((groups - least) / scale).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(0, _GREATEST[4])
    numbers = numbers.to(torch.uint8)
    packed = numbers[..., :_HALF] | numbers[..., _HALF:] << 4
    return packed.flatten(1), scales
