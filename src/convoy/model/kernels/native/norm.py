"""Compute an RMS norm in the written order (docs/exact.md): in one compiled call, or by torch's operators."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import nn

from convoy.model.kernels.native.choice import choose_library
from convoy.model.kernels.native.library import NativeLibrary

_PROBE_ROWS = 67
# A row is added in four runs of vectors of eight, side by side, and in four levels.
_LANES, _RUNS, _LEVELS = 8, 4, 4


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return float32 [..., size] over each row's root mean square, times ``weight`` [size].

    torch's operators compute it where nothing compiled has the written order.
    """
    library = norm_library(x.shape[-1])
    if library is None:
        return nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return native_norm(library, x.contiguous(), weight, eps)


@functools.cache
def norm_library(size: int, offered: tuple[NativeLibrary, ...] | None = None) -> NativeLibrary | None:
    """Return the compiled code that normalises rows of ``size`` in the written order, or None.

    ``offered`` is as `choose_library` takes it.
    """
    return choose_library("norms", functools.partial(_holds, size), offered)


def _holds(size: int, library: NativeLibrary) -> bool:
    """Return whether a library's norm has the bits of `norm_in_order`."""
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(_PROBE_ROWS, size, generator=generator)
    weight = torch.randn(size, generator=generator)
    return all(
        torch.equal(norm_in_order(x, given, 1e-6), native_norm(library, x, given, 1e-6))
        for given in (weight, None)
    )


def native_norm(
    library: NativeLibrary, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return what `rms_norm` does, for contiguous ``x``, by one library."""
    y = torch.empty_like(x)
    size = x.shape[-1]
    library.convoy_norm(
        *(x.data_ptr(), None if weight is None else weight.data_ptr(), eps, y.data_ptr()),
        *(x.numel() // size, size, torch.get_num_threads()),
    )
    return y


def norm_in_order(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return an RMS norm of float32 rows [n, size] slowly, by operations on single numbers."""
    mean = sum_in_order(x * x) / x.shape[1]
    # numpy rounds a root to the nearest float, and torch does not always.
    root = torch.from_numpy(np.sqrt((mean + torch.tensor(eps)).numpy()))
    y = x * (1.0 / root)[:, None]
    return y if weight is None else y * weight


def sum_in_order(x: torch.Tensor) -> torch.Tensor:
    """Return the sum [n] of each float32 row [n, size], by additions of single numbers.

    The order is ATen's for contiguous rows (`SumKernel.cpp`).
    """
    num_vectors = x.shape[1] // _LANES
    num_steps = num_vectors // _RUNS
    power = max(4, max(0, num_steps - 1).bit_length() // _LEVELS)
    vectors = x[:, : num_vectors * _LANES].reshape(len(x), num_vectors, _LANES)
    steps = vectors[:, : num_steps * _RUNS].reshape(len(x), num_steps, _RUNS, _LANES)
    zeros = x.new_zeros(len(x), _RUNS, _LANES)
    levels = [zeros] * _LEVELS
    for i in range(num_steps):
        levels[0] = levels[0] + steps[:, i]
        # A whole run goes to the next level, unless it is begun and not ended.
        if (i + 1) % (1 << power) == 0:
            for level in range(1, _LEVELS):
                levels[level] = levels[level] + levels[level - 1]
                levels[level - 1] = zeros
                if (i + 1) & (((1 << power) - 1) << (level * power)):
                    break
    total = levels[0] + levels[1] + levels[2] + levels[3]
    first = total[:, 0]
    for i in range(num_steps * _RUNS, num_vectors):
        first = first + vectors[:, i]
    for run in range(1, _RUNS):
        first = first + total[:, run]
    tail = x.new_zeros(len(x))
    for number in (*x[:, num_vectors * _LANES :].unbind(1), *first.unbind(1)):
        tail = tail + number
    return tail
