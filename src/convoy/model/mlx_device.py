"""Tell whether MLX runs on this machine, on which processor, with how much memory, and how fast."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from convoy.config.mlx_launch import launcher_variable
from convoy.plan.memory.free import free_bytes
from convoy.plan.memory.memory import MEMORY_SHARE
from convoy.plan.speed import Speed

# The least version that was tried, and the first one that was not.
_LEAST, _BELOW = (0, 32), (0, 33)
_INSTALL = "pip install 'convoy-llm[mlx]', or set device = \"cpu\""
_UNLAUNCH = "start each member by itself: Convoy's own links between machines are sealed"
# Of the memory that Metal recommends to wire at most: the rest is left to the system and to steps.
_WIRED_SHARE = 0.8
_MEASURE_S = 0.2
_CHECK_S = 120.0
_READ_SHAPE = (8192, 2048)
_WIDTH, _ROWS = 1024, 256


def why_no_mlx() -> str:
    """Return the reason why no stage runs on MLX here, or "". Imports nothing of it.

    Links of `mx.distributed` between hosts are in clear, so a process that joined one is refused.
    """
    if (name := launcher_variable()) is not None:
        return f"{name} is set: mlx.launch or MPI started this process, and its links are not encrypted"
    try:
        version = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return "mlx is not installed"
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if _LEAST <= number < _BELOW:
        return ""
    least, below = (".".join(map(str, bound)) for bound in (_LEAST, _BELOW))
    return f"mlx is {version}, expected {least} or later and below {below}"


def how_to_run() -> str:
    """Return what makes MLX run here, or another way."""
    return _INSTALL if launcher_variable() is None else _UNLAUNCH


@dataclass(frozen=True)
class Platform:
    """Name a kind of machine, as the module `platform` does."""

    system: str
    machine: str

    @classmethod
    def here(cls) -> Platform:
        """Return this machine's."""
        return cls(platform.system(), platform.machine())

    @property
    def is_apple_silicon(self) -> bool:
        return (self.system, self.machine) == ("Darwin", "arm64")


@functools.cache
def why_not_steady() -> str:
    """Return what the start-up check of MLX's layers found wrong here, or "". It runs once in a process.

    It has a process of its own, so that a fault of a driver does not end this one.
    """
    command = [sys.executable, "-P", "-m", "convoy.model.backends.mlx.selfcheck"]
    try:
        found = subprocess.run(command, capture_output=True, check=False, timeout=_CHECK_S, text=True)
    except subprocess.TimeoutExpired:
        return f"its start-up check did not end within {_CHECK_S:.0f} s"
    except OSError:
        return "its start-up check could not start"
    lines = found.stderr.strip().splitlines()
    return (lines or ["its start-up check failed"])[-1] if found.returncode else ""


def why_not_default(here: Platform | None = None, check: Callable[[], str] = why_not_steady) -> str:
    """Return the reason why ``auto`` does not choose MLX on this machine, or ""."""
    if not (here or Platform.here()).is_apple_silicon:
        return "this machine is no Mac with Apple silicon"
    return why_no_mlx() or check()


def recommended_bytes() -> int:
    """Return the bytes that Metal recommends to wire at most, or 0 without Metal."""
    import mlx.core as mx

    return int(mx.device_info().get("max_recommended_working_set_size", 0)) if mx.metal.is_available() else 0


def wired_limit_bytes() -> int:
    """Return the bytes that stages of this process may wire, or 0 without Metal."""
    return int(recommended_bytes() * _WIRED_SHARE)


def set_wired_limit() -> str:
    """Let Metal keep up to `wired_limit_bytes` of stages resident. Return why it does not, or ""."""
    import mlx.core as mx

    limit = wired_limit_bytes()
    if not limit:
        return ""
    try:
        mx.set_wired_limit(limit)
    except (ValueError, RuntimeError) as error:
        return f"Metal refused a wired limit of {limit} bytes: {error}"
    return ""


def memory_bytes() -> int:
    """Return the bytes that a member may use: unified memory counts once, and no more than may be wired."""
    free, limit = int(free_bytes() * MEMORY_SHARE), wired_limit_bytes()
    return min(free, limit) if limit else free


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
