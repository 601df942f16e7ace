"""``bench/compare.py start``: the processor time of `import convoy` and of `convoy --help`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

# The arguments of Python, and the aim in seconds.
STARTS: Mapping[str, tuple[tuple[str, ...], float | None]] = {
    "python": (("-c", "pass"), None),
    "import convoy": (("-c", "import convoy"), 0.1),
    "convoy --help": (("-m", "convoy", "--help"), 0.25),
}


def start(rounds: Annotated[int, typer.Option(min=1, max=100, help="Processes of each kind.")] = 10) -> None:
    """Print the processor time of each start, beside that of an empty Python."""
    for name, (arguments, aim_s) in STARTS.items():
        aim = "" if aim_s is None else f", aim {aim_s:g} s"
        print(f"{name:14} {measure_start(arguments, rounds):.3f} s{aim}")


def measure_start(arguments: Sequence[str], rounds: int) -> float:
    """Return the least user and system time of ``rounds`` runs of Python, in seconds.

    Other programs only add to it. Raises OSError for a run that fails.
    """
    return min(_run(arguments) for _ in range(rounds))


def _run(arguments: Sequence[str]) -> float:
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise OSError(f"python {' '.join(arguments)} ended with {process.returncode}, expected 0")
    return used.ru_utime + used.ru_stime
