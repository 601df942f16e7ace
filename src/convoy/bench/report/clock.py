"""Track a run's time: its deadline, and the load by other processes since its beginning."""

from __future__ import annotations

import time

from convoy.bench.report.machine import Machine, Watch
from convoy.errors import ConvoyError


class Deadline:
    """Hold the end of a whole run."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._end_s = time.monotonic() + max_s

    def left_s(self) -> float:
        """Return the seconds left. Raises ConvoyError if none are left."""
        left = self._end_s - time.monotonic()
        if left <= 0:
            raise ConvoyError(
                f"the bench took longer than {self._max_s:g} s",
                hint="measure less, or allow more with --max-seconds",
            )
        return left


class Clock:
    """Hold a run's deadline and its watch over the machine."""

    def __init__(self, max_s: float) -> None:
        self.deadline = Deadline(max_s)
        self._watch = Watch()

    def machine(self) -> Machine:
        """Return the machine as `Watch.machine` does."""
        return self._watch.machine()
