"""Linears of several rows: the library's in bfloat16, ours where the weights were rounded."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from convoy.errors import ModelError
from convoy.model.backends.cuda.kernels.few import FewTile, few_int4, few_int8, unpack
from convoy.model.backends.cuda.kernels.lone import lone_linear
from convoy.model.backends.cuda.kernels.rounded import Matrix, RoundedMatrix, round_matrix

MAX_FEW = 128  # rows; of more, unpacking to bfloat16 once and the library's product take less time


def multiply(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, tile: FewTile | None = None
) -> torch.Tensor:
    """``x`` [rows, inputs] W^T + b: [rows, outputs], in the dtype of ``x``."""
    if isinstance(weight, torch.Tensor):
        return linear(x, weight, bias)
    if x.shape[0] > MAX_FEW:
        return linear(x, unpack(weight.numbers, weight.scales, weight.bits, x.dtype), bias)
    few = few_int8 if weight.bits == 8 else few_int4
    return few(x, weight.numbers, weight.scales, bias, tile)


def multiply_in_parts(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """As `multiply`, of a matrix so large that it is never unpacked whole."""
    if isinstance(weight, torch.Tensor) or x.shape[0] <= MAX_FEW:
        return multiply(x, weight)
    return torch.cat([multiply(rows, weight) for rows in torch.split(x, MAX_FEW)])


class DeviceLinear(nn.Module):
    """In place of a linear of the library's, on the device."""

    def __init__(self, weight: RoundedMatrix, bias: torch.Tensor | None) -> None:
        super().__init__()
        # found by whoever counts what a module holds
        self.register_buffer("numbers", weight.numbers)
        self.register_buffer("scales", weight.scales)
        self.matrix = weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        outputs, inputs = self.matrix.shape
        rows = x.reshape(-1, inputs)
        if rows.shape[0] == 1:
            return lone_linear(rows, self.matrix, bias=self.bias).view(*x.shape[:-1], outputs)
        return multiply(rows, self.matrix, self.bias).view(*x.shape[:-1], outputs)


def round_linears(module: nn.Module, bits: int, name: str) -> None:
    """Round every linear of the library's in ``module``, on its device.

    Raises ModelError for experts, which are no linears there and of which nearly all such a model is made.
    """
    if any(weight.dim() == 3 for weight in module.parameters()):
        raise ModelError(
            f"{name}: experts are not rounded on cuda yet", hint="run it without --quantize, or on cpu"
        )
    for parent in list(module.modules()):
        for child, part in list(parent.named_children()):
            if type(part) is nn.Linear:
                setattr(parent, child, rounded_linear(part, bits))


def rounded_linear(part: nn.Module, bits: int) -> DeviceLinear:
    """What takes the place of one."""
    assert isinstance(part, nn.Linear)
    return DeviceLinear(round_matrix(part.weight.detach(), bits), part.bias)
