"""Compute linears with 4-bit weights: weight-only, through torch's own CPU kernel.

Each group of 32 weights of an output has a bfloat16 scale and a bfloat16 value for its middle, so a weight
takes 5 bits. Activations are bfloat16, sums float32, results bfloat16. The kernel walks a row's inputs in
one order for any number of rows (`aten/src/ATen/native/cpu/int4mm_kernel.cpp`), which `selfcheck` proves
for every shape of a stage. `lm_head`, and matrices that the kernel does not take, are rounded to 8 bits
instead: in bfloat16 the best tokens would tie.
"""

from __future__ import annotations

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.kernels.activation import activate
from convoy.model.kernels.int8 import RoundedLinear, round_to_8_bits
from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.registry import LinearKernel

# Weights that share one scale.
GROUP = 32
# A matrix must have a multiple of so many outputs.
_OUTPUTS = 16
_MIDDLE, _GREATEST = 8, 15
_ROUNDED_ROWS = 1024


def int4_available() -> bool:
    """Return whether this build of torch has the kernel."""
    aten = torch.ops.aten
    return hasattr(aten, "_weight_int4pack_mm_for_cpu") and hasattr(
        aten, "_convert_weight_to_int4pack_for_cpu"
    )


def fits_int4(linear: PackedLinear) -> bool:
    """Return whether the kernel takes a matrix of this shape."""
    return linear.in_features % GROUP == 0 and linear.out_features % _OUTPUTS == 0


def round_to_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix [out, in] to int32 from 0 to 15, and [in / GROUP, out, 2]: bfloat16 scales and middles.

    A weight's value is (number - 8) * scale + middle.
    """
    outputs, inputs = weight.shape
    numbers = torch.empty(outputs, inputs, dtype=torch.int32)
    scales = torch.empty(inputs // GROUP, outputs, 2, dtype=torch.bfloat16)
    # Some rows at a time: float copies of a whole matrix would be the peak of loading.
    for start in range(0, outputs, _ROUNDED_ROWS):
        rows = slice(start, start + _ROUNDED_ROWS)
        numbers[rows], scales[:, rows] = _round_rows(weight[rows])
    return numbers, scales


def _round_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.detach().to(torch.float32).reshape(weight.shape[0], -1, GROUP)
    least, greatest = groups.amin(-1), groups.amax(-1)
    scale = ((greatest - least) / _GREATEST).to(torch.bfloat16)
    middle = (least + _MIDDLE * ((greatest - least) / _GREATEST)).to(torch.bfloat16)
    steps = (groups - middle.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
    # A group of equal weights has scale 0, so every weight becomes its middle.
    numbers = steps.nan_to_num_(0.0, 0.0, 0.0).round_().add_(_MIDDLE).clamp_(0, _GREATEST)
    return numbers.flatten(1), torch.stack((scale.t(), middle.t()), -1)


class Int4Linear(RoundedLinear):
    """Compute y = activation(x W^T + b) from 4-bit weights. The float weights are not kept.

    The matrix must fit (`fits_int4`). ``activation`` is one of `activation.ACTIVATIONS`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
    ) -> None:
        # The parent's constructor would pack the float weights, so it is skipped.
        nn.Module.__init__(self)
        if not int4_available():
            raise SelfCheckError(
                "this build of torch has no 4-bit linears", hint='set kernel = "auto", without --quantize'
            )
        self.out_features, self.in_features = weight.shape
        numbers, self._scales = round_to_4_bits(weight)
        self._numbers = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        self._bias = None if bias is None else bias.detach().to(torch.float32).clone()
        self.activation = activation
        self.weight_bytes = sum(t.nbytes for t in (self._numbers, self._scales, self._bias) if t is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, in_features] to [..., rows, out_features]."""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._numbers, GROUP, self._scales)
        y: torch.Tensor = product.to(torch.float32)
        if self._bias is not None:
            y.add_(self._bias)
        return activate(y, self.activation).view(*x.shape[:-1], self.out_features)


def _round_linear(linear: PackedLinear) -> RoundedLinear:
    """Return the 4-bit form of a packed linear, or the 8-bit one where the shape does not fit."""
    if not fits_int4(linear):
        return round_to_8_bits(linear)
    return Int4Linear(*linear.dense(), linear.activation)


KERNEL = LinearKernel(int4_available, Int4Linear, _round_linear)
