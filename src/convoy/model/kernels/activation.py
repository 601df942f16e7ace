"""Compute activations with bits that do not depend on where a number stands in a tensor."""

from __future__ import annotations

import torch

from convoy.model.kernels.native.activation import native_activate

ACTIVATIONS = frozenset({"silu", "swish", "relu", "gelu", "gelu_pytorch_tanh", "gelu_new"})
_GELU_SLOPE, _GELU_CUBE = 0.7978845608028654, 0.044715


def activate(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply an activation of `ACTIVATIONS`, or none, in place. Returns ``y``.

    ATen's own activations differ in bits between a tensor's vectors and its tail; `exp` and single
    products do not.
    """
    if activation is None:
        return y
    if activation == "relu":
        return y.relu_()
    if native_activate(y, activation):
        return y
    if activation in {"silu", "swish"}:
        return y.div_(torch.exp(-y).add_(1.0))
    if activation == "gelu":
        return y.mul_(torch.erf(y * 0.7071067811865476).add_(1.0).mul_(0.5))
    # Gelu's tanh form: tanh(u) = 1 - 2 / (1 + e^2u), so that y / 2 * (1 + tanh(u)) = y / (1 + e^-2u).
    inner = (y * y).mul_(_GELU_CUBE).add_(1.0).mul_(y).mul_(-2 * _GELU_SLOPE)
    return y.div_(torch.exp(inner).add_(1.0))
