"""Convert between torch and MLX, and keep all of a stage's MLX work on one thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import mlx.core as mx
import numpy as np
import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_BYTE_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


class OwnerThread:
    """Run calls on one thread, one after the other.

    A stream of MLX belongs to the thread that made it: another thread cannot evaluate what waits on it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlx")

    def run(
        self,
        work: Callable[_Arguments, _Result],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        """Return the result of ``work``, or raise its error, once the thread has done it."""
        return self._pool.submit(work, *arguments, **named).result()

    def end(self) -> None:
        """End the thread after the calls that it still has."""
        self._pool.shutdown(wait=True)


def to_mlx(tensor: torch.Tensor, dtype: mx.Dtype | None = None) -> mx.array:
    """Return a copy of ``tensor``, in ``dtype`` if it is given. Floats of 8 bits come as their bytes."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        # NumPy has no bfloat16.
        found = mx.array(tensor.view(torch.int16).numpy().view(np.uint16)).view(mx.bfloat16)
    elif tensor.dtype in _BYTE_FLOATS:
        found = mx.array(tensor.view(torch.uint8).numpy())
    elif tensor.dtype == torch.float64:
        # MLX would round it on a GPU, which has no float64.
        found = mx.array(tensor.float().numpy())
    else:
        found = mx.array(tensor.numpy())
    return found if dtype is None else found.astype(dtype)


def to_torch(array: mx.array) -> torch.Tensor:
    """Return a copy of ``array`` as a tensor of the same dtype. Evaluates it."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
