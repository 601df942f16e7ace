"""Compute `exp` and functions made of it in compiled code, and activations made of these.

The formulas are Convoy's own (`formulas`). Compiled code is used if it has their bits.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from convoy.model.kernels.native.choice import choose_library
from convoy.model.kernels.native.formulas import FORMULAS
from convoy.model.kernels.native.library import ActivationStruct, NativeLibrary

# By name, the numbers in `activation.c`.
_FUNCTIONS = {"exp": 0, "expm1": 1, "tanh": 2, "erf": 3}
_KINDS = {
    "elsewhere": 0,
    "silu": 1,
    "swish": 1,
    "gelu": 2,
    "gelu_pytorch_tanh": 3,
    "gelu_new": 3,
    "relu": 4,
    "relu2": 5,
    "xielu": 6,
    "clamped": 7,
    "limited": 8,
}
# Those without numbers that multiply a gate with a factor, or with 1.
GATED_ACTIVATIONS = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"})


@dataclass(frozen=True)
class Activation:
    """Hold an activation in the form that compiled code reads: its name, and up to four numbers."""

    name: str
    numbers: tuple[float, ...] = ()

    @property
    def struct(self) -> ActivationStruct:
        """Return the form that compiled code reads."""
        return ActivationStruct(_KINDS[self.name], (ctypes.c_float * 4)(*self.numbers))


@functools.cache
def exp_library(offered: tuple[NativeLibrary, ...] | None = None) -> NativeLibrary | None:
    """Return the compiled code with the formulas' bits on a sample of all sizes, or None.

    Attention and activations are made of them. ``offered`` is as `choose_library` takes it.
    """
    return choose_library("exp", _has_formulas, offered)


def exp_sample() -> torch.Tensor:
    """Return float32 numbers [n]: some of each power of two and sign, and all that are special."""
    generator = torch.Generator().manual_seed(20)
    # All exponents: those of 0 and of infinity and NaN are the first and the last.
    exponents = torch.arange(512, dtype=torch.int64).repeat_interleave(64) << 23
    bits = exponents + torch.randint(0, 1 << 23, exponents.shape, generator=generator)
    bits = torch.cat((bits, exponents[::64]))
    # Most numbers of all sizes are too small or too great to say much.
    usual = 8 * torch.randn(8192, generator=generator)
    return torch.cat((bits.to(torch.int32).view(torch.float32), usual))


def native_apply(library: NativeLibrary, function: str, x: torch.Tensor) -> torch.Tensor:
    """Replace contiguous float32 ``x`` by a function of `FORMULAS`, and return it."""
    library.convoy_apply(x.data_ptr(), x.numel(), _FUNCTIONS[function], torch.get_num_threads())
    return x


def native_activate(y: torch.Tensor, activation: Activation, factor: torch.Tensor | None = None) -> bool:
    """Apply an activation in place, and multiply by ``factor`` of the same shape.

    Returns False, with ``y`` unchanged, where compiled code does not do this.
    """
    library = exp_library()
    if library is None or not is_plain(y) or not (factor is None or is_plain(factor)):
        return False
    address = None if factor is None else factor.data_ptr()
    library.convoy_activate(
        *(activation.struct, y.data_ptr(), y.numel(), address, y.numel()),
        *(y.data_ptr(), 1, y.numel(), torch.get_num_threads()),
    )
    return True


def is_plain(x: torch.Tensor) -> bool:
    """Return whether compiled code takes ``x``: contiguous float32 of the host."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()


def _has_formulas(library: NativeLibrary) -> bool:
    """Return whether a library's functions have the bits of the formulas, those of NaNs aside."""
    sample = exp_sample()
    for name, formula in FORMULAS.items():
        # The formula of e^x - 1 ends there.
        x = sample.clamp(max=88.0) if name == "expm1" else sample
        expected, found = formula(x), native_apply(library, name, x.clone())
        same = (expected.view(torch.int32) == found.view(torch.int32)) | (expected.isnan() & found.isnan())
        if not same.all():
            return False
    return True
