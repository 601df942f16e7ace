"""How fast this machine reads weights and multiplies: what `plan.rates` predicts from, in under a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from convoy.model.device import CUDA_KERNEL, HOST, check_device
from convoy.model.int4 import Int4Linear
from convoy.model.linear import PackedLinear, pad_rows
from convoy.model.quantized import Int8Linear
from convoy.model.selfcheck import EXACT, W4A16, W8A8
from convoy.plan.kernels import form_of
from convoy.plan.rates import Speed

_READ_SHAPE = {HOST: (16384, 1024), "cuda": (32768, 8192)}  # a matrix that is more than a cache holds
_ROUNDED_COUNT = 2  # so many of them, where weights are rounded
_WIDTH = {HOST: 1024, "cuda": 8192}
_ROWS = {HOST: 256, "cuda": 2048}
_MEASURE_S = 0.12


def measure_speed(kernel: str, num_threads: int | None = None, device: str = HOST) -> Speed:
    """The best of some products of a lone row with a large matrix, and of some of a prefill's size.

    The first is what a decode does: how fast the ``kernel`` gets weights out of memory, not what the memory
    could do. Threads are those that a stage would have. Raises ModelError for a device that is not here,
    SelfCheckError for a kernel that does not run here.
    """
    chosen = torch.device(HOST) if device == HOST else check_device(device)
    kind, form = chosen.type, form_of(kernel)
    with torch.inference_mode(), _threads(num_threads):
        outputs, inputs = _READ_SHAPE[kind]
        weight = torch.full((outputs, inputs), 0.5, device=chosen)
        linears = [_linear(kernel, weight) for _ in range(_ROUNDED_COUNT if form.bits else 1)]
        del weight
        lone = torch.ones(1, inputs, device=chosen, dtype=_dtype(kernel))
        row = pad_rows(lone) if form.packed else lone
        read_s = _best_s(lambda: [linear(row) for linear in linears], chosen)
        num_bytes = len(linears) * form.linear_bytes(outputs, inputs)
        width, rows = _WIDTH[kind], _ROWS[kind]
        linear = _linear(kernel, torch.full((width, width), 0.5, device=chosen))
        x = torch.ones(rows, width, device=chosen, dtype=_dtype(kernel))
        product_s = _best_s(lambda: linear(x), chosen)
    return Speed(num_bytes / read_s, 2 * rows * width * width / product_s)


def _linear(kernel: str, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    if kernel == EXACT:
        return PackedLinear(weight, None)
    if kernel == W8A8:
        return Int8Linear(weight, None)
    if kernel == W4A16:
        return Int4Linear(weight, None)
    held = weight.to(_dtype(kernel))
    return lambda x: nn.functional.linear(x, held)


def _dtype(kernel: str) -> torch.dtype:
    return torch.bfloat16 if kernel == CUDA_KERNEL else torch.float32


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of at least three runs: whatever else the machine does only makes them longer."""
    best, until_s, count = float("inf"), time.perf_counter() + _MEASURE_S, 0
    while count < 3 or time.perf_counter() < until_s:
        began_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, count = min(best, time.perf_counter() - began_s), count + 1
    return max(best, 1e-9)


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
