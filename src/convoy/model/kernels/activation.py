"""Compute activations with the written order's bits, wherever a number stands in a tensor.

Compiled code does it, or `native.formulas` by torch's operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from convoy.model.kernels.native import formulas
from convoy.model.kernels.native.activation import (
    Activation,
    exp_library,
    is_plain,
    native_activate,
    native_apply,
)

ACTIVATIONS = frozenset({"silu", "swish", "relu", "gelu", "gelu_pytorch_tanh", "gelu_new"})
_GELU_SLOPE, _GELU_CUBE = 0.7978845608028654, 0.044715
# Numbers to which torch's operators are applied at once, so that they stay in a core's cache.
_PART = 1 << 15


def activate(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply an activation of `ACTIVATIONS`, or none, in place. Returns ``y``."""
    if activation is None:
        return y
    if activation == "relu":
        return y.relu_()
    if native_activate(y, Activation(activation)):
        return y
    if activation in {"silu", "swish"}:
        return y.div_(exp_(-y).add_(1.0))
    if activation == "gelu":
        return y.mul_(_apply("erf", y * 0.7071067811865476).add_(1.0).mul_(0.5))
    # Gelu's tanh form: tanh(u) = 1 - 2 / (1 + e^2u), so that y / 2 * (1 + tanh(u)) = y / (1 + e^-2u).
    inner = (y * y).mul_(_GELU_CUBE).add_(1.0).mul_(y).mul_(-2 * _GELU_SLOPE)
    return y.div_(exp_(inner).add_(1.0))


def exp_(x: torch.Tensor) -> torch.Tensor:
    """Replace float32 numbers of the host by e^x. Returns ``x``."""
    return _apply("exp", x)


def tanh_(x: torch.Tensor) -> torch.Tensor:
    """Replace float32 numbers of the host by their tanh. Returns ``x``."""
    return _apply("tanh", x)


def exact_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (e^-x + 1) of float32 numbers of the host."""
    return exp_(x.neg()).add_(1).reciprocal_()


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + e^x) of float32 numbers of the host: computed in float64, and rounded once."""
    return formulas.softplus(x).to(torch.float32)


class ExactXielu(nn.Module):
    """Compute Apertus's activation, with the numbers of the library's module (arXiv:2411.13010)."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        alphas = (module.alpha_p, module.alpha_n)
        positive, negative = (softplus(alpha.detach().to(torch.float32)) for alpha in alphas)
        beta = module.beta.to(torch.float32)
        numbers = (positive, beta + negative, beta, module.eps.to(torch.float32))
        self.compiled = Activation("xielu", tuple(float(number) for number in numbers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map any shape to the same."""
        y = x.clone(memory_format=torch.contiguous_format)
        if native_activate(y, self.compiled):
            return y
        positive, negative, slope, bound = self.compiled.numbers
        rest = x * slope
        below = (_apply("expm1", x.clamp(max=bound)) - x).mul_(negative).add_(rest)
        return torch.where(x > 0, (x * positive).mul_(x).add_(rest), below)


def _apply(function: str, x: torch.Tensor) -> torch.Tensor:
    """Replace ``x`` by a function of `formulas.FORMULAS`, and return it."""
    if not x.is_contiguous():
        return x.copy_(_apply(function, x.contiguous()))
    library = exp_library()
    if library is not None and is_plain(x):
        return native_apply(library, function, x)
    for part in torch.split(x.view(-1), _PART):
        part.copy_(formulas.FORMULAS[function](part))
    return x
