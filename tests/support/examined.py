"""Examine this machine once in a test process, where a program examines it once at its start.

A test process stands for many members, and each would check exact mode, digest its bits and measure its
speed anew: a quarter of a second, or two, that show nothing. The checks and measurements themselves have
tests of their own, which call them directly.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest


def examine_once(patch: pytest.MonkeyPatch) -> None:
    """Keep the results for equal arguments, in the modules that the collected tests have imported."""
    for name, functions in (
        ("convoy.cluster.offer", ("available_kernels", "bits_digest")),
        ("convoy.cluster.head.step_time", ("measure_speed",)),
    ):
        module = sys.modules.get(name)
        for function in functions if module is not None else ():
            patch.setattr(module, function, functools.cache(getattr(module, function)))
    speed = sys.modules.get("convoy.cluster.own_speed")
    if speed is not None:
        patch.setattr(speed, "own_speed", _without_folder(speed))


def _without_folder(module: ModuleType) -> object:
    """Return `own_speed`, kept for each kernel, number of threads and device. It writes to no folder."""
    measure = functools.cache(module.own_speed)

    def own_speed(kernel: str, num_threads: int | None, device: str, folder: object) -> object:
        return measure(kernel, num_threads, device, None)

    return own_speed
