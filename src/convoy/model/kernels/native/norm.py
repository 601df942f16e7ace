"""Compute an RMS norm in one call, with the bits of torch's six."""

from __future__ import annotations

import functools

import torch
from torch import nn

from convoy.model.kernels.native.library import native_library

_PROBE_ROWS = 67


@functools.cache
def norm_holds(size: int) -> bool:
    """Return whether the norm is compiled here and has torch's bits for rows of ``size``."""
    if native_library() is None:
        return False
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(_PROBE_ROWS, size, generator=generator)
    weight = torch.randn(size, generator=generator)
    for given in (weight, None):
        expected = nn.functional.rms_norm(x, (size,), given, 1e-6)
        if not torch.equal(expected, native_norm(x, given, 1e-6)):
            return False
    return True


def native_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return contiguous float32 [..., size] over each row's root mean square, times ``weight`` [size]."""
    library = native_library()
    assert library is not None, "nothing is compiled here"
    y = torch.empty_like(x)
    size = x.shape[-1]
    library.convoy_norm(
        *(x.data_ptr(), None if weight is None else weight.data_ptr(), eps, y.data_ptr()),
        *(x.numel() // size, size, torch.get_num_threads()),
    )
    return y
