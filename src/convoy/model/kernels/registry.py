"""Find what a kernel of hosts offers here: with rounded linears its factories, and the form of its weights.

The rows stand in `config.kernels`, which knows no torch. A row names the module with its `KERNEL`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from convoy.config.kernels import HOST_KERNELS, KERNELS, form_of, held_form
from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.native.library import keeps_stored


@dataclass(frozen=True)
class LinearKernel:
    """Offer rounded linears in place of exact mode's."""

    # Whether this build of torch has them.
    is_available: Callable[[], bool]
    # Makes a linear of a float matrix [out, in] and a bias.
    make: Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
    # Returns the rounded form of a packed linear.
    round_linear: Callable[[PackedLinear], nn.Module]
    # Returns one module of gate, up and down; None: the three are rounded by themselves.
    join_mlp: Callable[[PackedLinear, PackedLinear, PackedLinear], nn.Module] | None = None


def linear_kernel(name: str) -> LinearKernel:
    """Return what the module of the kernel ``name`` offers; the row must name a module."""
    found: LinearKernel = importlib.import_module(KERNELS[name].module).KERNEL
    return found


def rounded_kernels() -> list[str]:
    """Return the kernels with rounded linears that work here, each with the one for what does not fit it."""
    named = [name for name in HOST_KERNELS if KERNELS[name].module]
    return [name for name in named if all(linear_kernel(one).is_available() for one in _needed(name))]


def _needed(name: str) -> list[str]:
    otherwise = form_of(name).otherwise
    return [name, otherwise] if otherwise else [name]


def own_form(kernel: str) -> str:
    """Return the word of the form in which this machine holds a kernel's weights.

    Without compiled code, matrices in the form of their file would be unpacked in every step. So they are
    unpacked as they are read.
    """
    return held_form(kernel, unpacks=not keeps_stored())
