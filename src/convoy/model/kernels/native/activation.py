"""Compute `exp`, and activations made of it, with the bits of torch's operators.

torch computes `exp` with MKL's `vmsExp` where it was built with MKL, and else with SLEEF. MKL's has other
bits for some numbers of a hundred, and no published formula. So compiled code calls it at its address in
torch's own library, and computes SLEEF's formula only where that has torch's bits.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from convoy.model.kernels.native.choice import choose_library
from convoy.model.kernels.native.library import NativeLibrary

_TORCH_LIBRARY = Path("lib/libtorch_cpu.so")
# By name, the numbers in `activation.c`.
_KINDS = {"exp": 0, "silu": 1, "swish": 1, "gelu_pytorch_tanh": 2, "gelu_new": 2}
NATIVE_ACTIVATIONS = frozenset(_KINDS) - {"exp"}


@functools.cache
def exp_library(offered: tuple[NativeLibrary, ...] | None = None) -> NativeLibrary | None:
    """Return the compiled code with torch's bits of `exp` on a sample of all sizes, or None.

    Attention and activations are made of it. ``offered`` is as `choose_library` takes it.
    """
    return choose_library("exp", _takes_exp, offered)


def exp_sample() -> torch.Tensor:
    """Return float32 numbers [n]: some of each power of two and sign, and all that are special."""
    generator = torch.Generator().manual_seed(20)
    # All exponents: those of 0 and of infinity and NaN are the first and the last.
    exponents = torch.arange(512, dtype=torch.int64).repeat_interleave(64) << 23
    bits = exponents + torch.randint(0, 1 << 23, exponents.shape, generator=generator)
    bits = torch.cat((bits, exponents[::64]))
    return bits.to(torch.int32).view(torch.float32)


def native_exp(library: NativeLibrary, x: torch.Tensor) -> torch.Tensor:
    """Return `exp` of contiguous float32 ``x`` by one library of `exp_library`."""
    y = torch.empty_like(x)
    size = x.numel()
    library.convoy_activate(x.data_ptr(), size, None, 0, y.data_ptr(), 1, size, _KINDS["exp"], 1)
    return y


def native_activate(y: torch.Tensor, activation: str, factor: torch.Tensor | None = None) -> bool:
    """Apply one of `NATIVE_ACTIVATIONS` in place, and multiply by ``factor`` of the same shape.

    Returns False, with ``y`` unchanged, where compiled code does not do this.
    """
    library = exp_library() if activation in NATIVE_ACTIVATIONS else None
    if library is None or not _is_plain(y) or not (factor is None or _is_plain(factor)):
        return False
    address = None if factor is None else factor.data_ptr()
    library.convoy_activate(
        *(y.data_ptr(), y.numel(), address, y.numel(), y.data_ptr(), 1, y.numel()),
        *(_KINDS[activation], torch.get_num_threads()),
    )
    return True


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()


def _takes_exp(library: NativeLibrary) -> bool:
    """Let a library compute `exp` in the way that has torch's bits here. Return False where none has."""
    sample = exp_sample()
    expected = torch.exp(sample)
    for address in (None, _mkl_exp()):
        library.convoy_use_exp(address)
        if _same(expected, native_exp(library, sample)):
            return True
    return False


def _mkl_exp() -> int | None:
    """Return the address of MKL's function in torch's library, or None."""
    try:
        # The library is loaded already, so that this gives its functions.
        own = ctypes.CDLL(str(Path(torch.__file__).parent / _TORCH_LIBRARY))
        return ctypes.cast(own.vmsExp, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


def _same(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether the bits are equal, those of NaNs aside."""
    return bool(
        ((expected.view(torch.int32) == found.view(torch.int32)) | expected.isnan() & found.isnan()).all()
    )
