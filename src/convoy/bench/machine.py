"""What a figure needs beside it: the machine's kind and how busy it was. No host names, no paths."""

from __future__ import annotations

import os
import platform
import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """``load``: the 1-minute load average before the run; above 0 means that others used the cores too."""

    cpu: str
    num_cores: int
    system: str
    python: str
    openssl: str
    load: float


def this_machine() -> Machine:
    """As the operating system describes it."""
    return Machine(
        cpu=_cpu(),
        num_cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        openssl=ssl.OPENSSL_VERSION,
        load=round(os.getloadavg()[0], 2),
    )


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())
