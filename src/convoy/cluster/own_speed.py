"""Measure how fast this machine is: several short measurements now, and those of earlier days.

On an idle machine the fastest measurement says most. Beside other programs one may be far too low or,
because it rests on differences of times, far too high: then the middle one counts, and it is not kept.
A machine that seems idle may still give a false one. So the middle one of the last few kept ones counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from convoy.model.backends.host.speed import measure_speed
from convoy.plan.speed import Speed

FILE = "speed.json"
# The share of all cores above which a measurement may be far too low.
BUSY = 0.25
_MOST_S, _MOST_ROUNDS = 3.0, 5
_LOOK_S = 0.2
# Measurements of idle moments, for each kernel, number of threads and device.
_MOST_KEPT = 5
_MAX_FILE_BYTES, _MAX_ENTRIES = 256 * 1024, 64

# Takes a kernel, the number of threads, a device and the form of files.
Measure = Callable[[str, int | None, str, str], Speed]


@dataclass(frozen=True)
class OwnSpeed:
    """Hold a speed. ``busy`` is the share of all cores that programs used just before.

    ``is_kept`` marks a speed from an earlier day.
    """

    speed: Speed
    busy: float
    is_kept: bool = False

    @property
    def warning(self) -> str | None:
        """Return the reason why the figures may be too low; None if they are not."""
        if self.busy <= BUSY:
            return None
        kept = "the figures are the middle of earlier measurements"
        text = f"programs use {self.busy:.0%} of this machine's cores: "
        return text + (kept if self.is_kept else "figures may be too low")


def own_speed(
    kernel: str,
    num_threads: int | None,
    device: str,
    folder: Path | None,
    *,
    form: str = "",
    rough: bool = False,
    measure: Measure = measure_speed,
    busy: Callable[[], float] = lambda: psutil.cpu_percent(_LOOK_S) / 100,
    now: Callable[[], float] = time.monotonic,
) -> OwnSpeed:
    """Return the middle of the last few idle measurements in ``folder``, the best of now included.

    Those of now take at most 3 s, and one is made at least. On a busy machine the result is the middle of
    the kept ones, else of those of now. Nothing is measured there, or for a ``rough`` question, if any are
    kept. ``form`` is that of the model's files, as `measure_speed` takes it. Raises its errors. With an
    unusable folder, it only keeps none.
    """
    used = busy()
    key = f"{platform.machine()} {_cpu()} {os.cpu_count()} {kernel} {num_threads} {device} {form}".rstrip()
    kept = {} if folder is None else _read(folder / FILE)
    speeds = kept.pop(key, [])
    is_busy = used > BUSY
    if speeds and (is_busy or rough):
        return OwnSpeed(_middle(speeds), used, is_kept=True)
    began_s = now()
    found = [measure(kernel, num_threads, device, form)]
    while len(found) < _MOST_ROUNDS and (len(found) + 1) / len(found) * (now() - began_s) <= _MOST_S:
        found.append(measure(kernel, num_threads, device, form))
    if is_busy:
        return OwnSpeed(_middle(found), used)
    here = max(found, key=_rate)
    if folder is None:
        return OwnSpeed(here, used)
    speeds = [*speeds, here][-_MOST_KEPT:]
    _write(folder / FILE, dict([*kept.items(), (key, speeds)][-_MAX_ENTRIES:]))
    speed = _middle(speeds)
    return OwnSpeed(speed, used, is_kept=speed is not here)


def _rate(speed: Speed) -> float:
    return speed.read_bytes_per_s


def _middle(speeds: list[Speed]) -> Speed:
    """Return the middle speed, and the lower one of two: a false measurement that is kept is too high."""
    return sorted(speeds, key=_rate)[(len(speeds) - 1) // 2]


def _read(path: Path) -> dict[str, list[Speed]]:
    """Return the kept speeds; empty if there is no such file, or if `_write` did not make it."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return {}
        values = json.loads(path.read_bytes())
        return {
            str(key): [_speed(each) for each in list(speeds)[-_MOST_KEPT:]]
            for key, speeds in list(values.items())[:_MAX_ENTRIES]
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _speed(values: dict[str, float | None]) -> Speed:
    """Return a speed from its values. Raises TypeError or ValueError for any other values."""
    names = {field.name for field in dataclasses.fields(Speed)} - {"assumed"}
    read = {name: None if value is None else float(value) for name, value in values.items()}
    if set(read) != names or any(value is not None and not 0 <= value < 1e18 for value in read.values()):
        raise ValueError("not a speed")
    if not read["read_bytes_per_s"] or not read["flop_per_s"]:
        raise ValueError("not a speed")
    return Speed(**read)  # type: ignore[arg-type]


def _write(path: Path, kept: dict[str, list[Speed]]) -> None:
    values = {key: [dataclasses.asdict(speed) for speed in speeds] for key, speeds in kept.items()}
    for each in itertools.chain.from_iterable(values.values()):
        del each["assumed"]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{FILE}.", delete=False) as file:
            json.dump(values, file)
        Path(file.name).replace(path)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
