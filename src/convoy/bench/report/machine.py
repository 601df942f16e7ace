"""Describe the machine beside its figures: its kind and how busy it was. No host names, no paths."""

from __future__ import annotations

import os
import platform
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Machine:
    """Describe a machine. ``load`` is the 1-minute load average before the run.

    ``others`` is the share of all cores' time that other processes, or the hypervisor, took during the run.
    If it is not near 0, the figures are those of a busy machine.
    """

    cpu: str
    num_cores: int
    system: str
    python: str
    openssl: str
    load: float
    others: float


class Watch:
    """Observe the machine from construction to ``machine``.

    Children count as ours once they are waited for.
    """

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._started_s = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def machine(self) -> Machine:
        """Return the machine as the operating system describes it, with the load by other processes
        meanwhile.
        """
        num_cores = os.cpu_count() or 1
        passed_s = (time.monotonic() - self._started_s) * num_cores
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return Machine(
            cpu=_cpu(),
            num_cores=num_cores,
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            openssl=ssl.OPENSSL_VERSION,
            load=round(self._load, 2),
            others=round(min(1.0, max(0.0, others_s / passed_s)), 3),
        )


def _busy_s() -> float:
    # Interrupt time counts as others' time, though much of it is for our own packets. So others may look
    # busier than they were, but never idler.
    times = psutil.cpu_times()
    optional = sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq", "steal"))
    return float(times.user + times.system + optional)


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())
