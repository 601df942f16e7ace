"""A log that strangers cannot fill: a few lines of a cause per interval, then a count of the rest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_MAX_CAUSES = 64
_OTHER = "other causes"


@dataclass(slots=True)
class _Tally:
    """Count the lines of one cause in the interval that began at ``since_s``."""

    since_s: float
    written: int = 0
    left_out: int = 0


class RateLimitedLog:
    """Write warnings, at most ``max_lines`` of a cause in each ``interval_s``.

    Further warnings are counted. The count is written after the interval: with the next warning of any
    cause, or by `flush`.
    """

    def __init__(
        self,
        log: logging.Logger,
        *,
        max_lines: int = 10,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._max_lines = max_lines
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._tallies: dict[str, _Tally] = {}

    @property
    def num_causes(self) -> int:
        """Return how many causes are told apart now."""
        return len(self._tallies)

    def warning(self, cause: str, text: str, *, with_trace: bool = False) -> None:
        """Log ``text`` unless its cause has used up its lines.

        ``cause`` is a text of ours, never one of a peer, so that causes stay few. ``with_trace`` adds the
        trace of the exception being handled.
        """
        self.flush()
        with self._lock:
            if cause not in self._tallies and len(self._tallies) >= _MAX_CAUSES:
                cause = _OTHER
            tally = self._tallies.setdefault(cause, _Tally(self._clock()))
            if tally.written >= self._max_lines:
                tally.left_out += 1
                return
            tally.written += 1
        self._log.warning("%s", text, exc_info=with_trace)

    def flush(self, *, everything: bool = False) -> None:
        """Write the counts of the intervals that are over, or with ``everything`` of all intervals."""
        now_s = self._clock()
        with self._lock:
            over = [
                (cause, tally)
                for cause, tally in self._tallies.items()
                if everything or now_s - tally.since_s >= self._interval_s
            ]
            for cause, _ in over:
                del self._tallies[cause]
        for cause, tally in over:
            if tally.left_out:
                self._log.warning(
                    "%d more were refused within %.0f s, not logged one by one: %s",
                    tally.left_out,
                    max(1.0, now_s - tally.since_s),
                    cause,
                )
