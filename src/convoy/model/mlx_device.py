"""Tell whether MLX runs on this machine, on which processor, with how much memory, and how fast."""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections.abc import Callable

import psutil

from convoy.plan.memory.memory import MEMORY_SHARE
from convoy.plan.speed import Speed

# The least version that was tried, and the first one that was not.
_LEAST, _BELOW = (0, 32), (0, 33)
INSTALL = "pip install 'convoy-llm[mlx]', or set device = \"cpu\""
# Of the memory that Metal recommends to wire at most: the rest is left to the system and to steps.
_WIRED_SHARE = 0.8
_MEASURE_S = 0.2
_READ_SHAPE = (8192, 2048)
_WIDTH, _ROWS = 1024, 256


def why_no_mlx() -> str:
    """Return the reason why no stage runs on MLX here, or "". Imports nothing of it."""
    try:
        version = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return "mlx is not installed"
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if _LEAST <= number < _BELOW:
        return ""
    least, below = (".".join(map(str, bound)) for bound in (_LEAST, _BELOW))
    return f"mlx is {version}, expected {least} or later and below {below}"


def memory_bytes() -> int:
    """Return the bytes that a member may use: unified memory counts once, and Metal's limit holds."""
    import mlx.core as mx

    free = int(psutil.virtual_memory().available * MEMORY_SHARE)
    limit = mx.device_info().get("max_recommended_working_set_size")
    return min(free, int(int(limit) * _WIRED_SHARE)) if limit else free


def describe() -> str:
    """Return where MLX computes, such as ``mlx (Apple M3)`` or ``mlx (AMD EPYC, no GPU)``."""
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "unknown"))
    return f"mlx ({name})" if mx.metal.is_available() else f"mlx ({name}, no GPU)"


def measure_mlx() -> Speed:
    """Return the bytes per second of reading a matrix, and the products per second, in bfloat16."""
    import mlx.core as mx

    weight = mx.full(_READ_SHAPE, 0.5, dtype=mx.bfloat16)
    row = mx.ones((1, _READ_SHAPE[1]), dtype=mx.bfloat16)
    square = mx.full((_WIDTH, _WIDTH), 0.5, dtype=mx.bfloat16)
    rows = mx.ones((_ROWS, _WIDTH), dtype=mx.bfloat16)
    mx.eval(weight, row, square, rows)
    read_s = _best_s(lambda: mx.eval(row @ weight.T))
    product_s = _best_s(lambda: mx.eval(rows @ square.T))
    return Speed(weight.nbytes / read_s, 2 * _ROWS * _WIDTH * _WIDTH / product_s)


def _best_s(work: Callable[[], object]) -> float:
    best, until_s, count = float("inf"), time.perf_counter() + _MEASURE_S, 0
    while count < 3 or time.perf_counter() < until_s:
        began_s = time.perf_counter()
        work()
        best, count = min(best, time.perf_counter() - began_s), count + 1
    return max(best, 1e-9)
