"""Multiply several rows: the library's products in bfloat16 or floats of 8 bits, our kernels for codes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from convoy.config.kernels import KernelForm
from convoy.errors import ModelError
from convoy.model.backends.cuda.kernels.few_rows import MAX_FEW, FewTile, few_rows, takes_few, unpack
from convoy.model.backends.cuda.kernels.float8 import (
    RoundedRows,
    fits_float8,
    multiply_float8,
    round_to_float8,
)
from convoy.model.backends.cuda.kernels.forms import DeviceMatrix, Matrix
from convoy.model.backends.cuda.kernels.packing import pack_matrix, round_on_device
from convoy.model.backends.cuda.kernels.single_row import lone_linear
from convoy.model.quantize.search import GROUP


def multiply(
    x: torch.Tensor | RoundedRows,
    weight: Matrix,
    bias: torch.Tensor | None = None,
    tile: FewTile | None = None,
) -> torch.Tensor:
    """Return ``x`` [rows, inputs] W^T + b as [rows, outputs], in the dtype of ``x``."""
    if rounds_rows(weight):
        assert isinstance(weight, DeviceMatrix)
        return multiply_float8(x, weight, bias)
    assert isinstance(x, torch.Tensor), "rows are rounded for such matrices alone"
    if isinstance(weight, torch.Tensor):
        return linear(x, weight, bias)
    if tile is None and not takes_few(weight, x.shape[0]):
        return linear(x, unpack(weight, x.dtype), bias)
    return few_rows(x, weight, bias, tile)


def rounds_rows(weight: Matrix) -> bool:
    """Return whether rows are rounded to floats of 8 bits before they are multiplied by ``weight``."""
    return isinstance(weight, DeviceMatrix) and weight.rounds_rows


def multiply_in_parts(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Return `multiply` of a matrix so large that it must never be unpacked whole."""
    if isinstance(weight, torch.Tensor) or x.shape[0] <= MAX_FEW:
        return multiply(x, weight)
    return torch.cat([multiply(rows, weight) for rows in torch.split(x, MAX_FEW)])


class DeviceLinear(nn.Module):
    """Replace a linear of the library's on the device, with weights in a form."""

    def __init__(self, weight: DeviceMatrix, bias: torch.Tensor | None) -> None:
        super().__init__()
        # Buffers, so that code which counts a module's memory finds them.
        for number, tensor in enumerate(weight.tensors()):
            self.register_buffer(f"part_{number}", tensor)
        self.matrix = weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs]."""
        outputs, inputs = self.matrix.shape
        rows = x.reshape(-1, inputs)
        if rows.shape[0] == 1:
            return lone_linear(rows, self.matrix, bias=self.bias).view(*x.shape[:-1], outputs)
        return multiply(rows, self.matrix, self.bias).view(*x.shape[:-1], outputs)


def round_linears(module: nn.Module, form: KernelForm, name: str) -> None:
    """Round every linear of the library's in ``module``, on its device.

    Raises ModelError for experts. The library stores them as stacked matrices and not as linears, and they
    make up nearly all of such a model.
    """
    if any(weight.dim() == 3 for weight in module.parameters()):
        raise ModelError(
            f"{name}: experts are not rounded on cuda yet",
            hint="run it without --quantize and --compute, or on cpu",
        )
    for parent in list(module.modules()):
        for child, part in list(parent.named_children()):
            if type(part) is nn.Linear:
                setattr(parent, child, rounded_linear(part, form, name))


def rounded_linear(part: nn.Module, form: KernelForm, name: str) -> nn.Module:
    """Return the rounded replacement of the linear ``part``, or ``part`` if its shape does not allow it."""
    assert isinstance(part, nn.Linear)
    weight, told = part.weight.detach(), f"{name}: a linear"
    if form.floats and fits_float8(*weight.shape):
        return DeviceLinear(round_to_float8(weight, told), part.bias)
    if form.floats or not form.bits or part.in_features % GROUP:
        return part
    stored = round_on_device(weight, form.bits, told)
    return DeviceLinear(pack_matrix(stored, part.weight.device), part.bias)
