"""Measure how fast this machine reads weights and multiplies, in under a second, for `rates.rates`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from convoy.config.kernels import EXACT, INT8_KERNELS
from convoy.model.device import HOST, MLX, check_device
from convoy.model.library import importing
from convoy.model.mlx_device import measure_mlx
from convoy.plan.card_speed import on_card
from convoy.plan.speed import Speed

# A matrix larger than a cache.
_READ_SHAPE = (32768, 8192)
_WIDTH, _ROWS = 8192, 2048
_MEASURE_S = 0.12
_STARTS, _START_ROUNDS = 200, 5


def measure_speed(kernel: str, num_threads: int | None = None, device: str = HOST, form: str = "") -> Speed:
    """Return this machine's speed, from the best of some rounds: other load only makes rounds longer.

    On a host it measures layers as a stage runs them under ``kernel``, see `host.layer_speed`. With ``form``,
    a word as `form_speed.in_form` takes it, linears are those of ``kernel`` over weights in that form. On MLX
    or CUDA it measures products alone, a lone row's and a prefill's, in bfloat16. On CUDA the rates of
    ``form`` and the overheads of steps follow from these (`plan.card_speed`). The threads are those that a
    stage would have. Raises ModelError for a missing device, SelfCheckError for a kernel that does not run
    here.
    """
    if device == HOST:
        with importing():
            # Imported late: it imports transformers.
            from convoy.model.backends.host.form_speed import in_form
            from convoy.model.backends.host.layer_speed import measure_layers

        with _threads(num_threads):
            if not form:
                return measure_layers(kernel, num_threads)
            # Linears in the form are compared with float32 ones: layers of rounded weights lie in a cache.
            return in_form(measure_layers(EXACT, num_threads), form, rounds=kernel in INT8_KERNELS)
    if device == MLX:
        return measure_mlx()
    return on_card(_measure_products(check_device(device)), form)


@torch.inference_mode()
def _measure_products(device: torch.device) -> Speed:
    weight = torch.full(_READ_SHAPE, 0.5, device=device, dtype=torch.bfloat16)
    row = torch.ones(1, _READ_SHAPE[1], device=device, dtype=torch.bfloat16)
    read_s = _best_s(lambda: nn.functional.linear(row, weight), device)
    num_bytes = weight.numel() * weight.element_size()
    square = torch.full((_WIDTH, _WIDTH), 0.5, device=device, dtype=torch.bfloat16)
    x = torch.ones(_ROWS, _WIDTH, device=device, dtype=torch.bfloat16)
    product_s = _best_s(lambda: nn.functional.linear(x, square), device)
    flop_per_s = 2 * _ROWS * _WIDTH * _WIDTH / product_s
    return Speed(num_bytes / read_s, flop_per_s, starts_s=_start_s(device))


def _start_s(device: torch.device) -> float:
    """Return the seconds in which this host starts a small operation: a CUDA device runs it afterwards."""
    one, found = torch.zeros(1, device=device), []
    for _ in range(_START_ROUNDS):
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(_STARTS):
            one.add_(1)
        found.append((time.perf_counter() - began_s) / _STARTS)
    return min(found)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    best, until_s, count = float("inf"), time.perf_counter() + _MEASURE_S, 0
    while count < 3 or time.perf_counter() < until_s:
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        best, count = min(best, time.perf_counter() - began_s), count + 1
    return max(best, 1e-9)


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Run the body on ``num_threads`` threads, and restore the number of threads afterwards."""
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
