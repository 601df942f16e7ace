"""A run's beginning: what others did on the machine since then, and when it must end."""

from __future__ import annotations

import time

from convoy.bench.report.machine import Machine, Watch
from convoy.errors import ConvoyError


class Deadline:
    """The end of a whole run."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._end_s = time.monotonic() + max_s

    def left_s(self) -> float:
        """Raises ConvoyError where nothing is left."""
        left = self._end_s - time.monotonic()
        if left <= 0:
            raise ConvoyError(
                f"the bench took longer than {self._max_s:g} s",
                hint="measure less, or allow more with --max-seconds",
            )
        return left


class Clock:
    """Both of a run: its deadline and its watch over the machine."""

    def __init__(self, max_s: float) -> None:
        self.deadline = Deadline(max_s)
        self._watch = Watch()

    def machine(self) -> Machine:
        """As `Watch.machine`."""
        return self._watch.machine()
