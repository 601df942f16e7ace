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
class _LogCount:
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
        self._counts: dict[str, _LogCount] = {}

    @property
    def num_causes(self) -> int:
        """Return how many causes are told apart now."""
        return len(self._counts)

    def warning(self, cause: str, text: str, *, with_trace: bool = False) -> None:
        """Log ``text`` unless its cause has used up its lines.

        ``cause`` is a text of ours, never one of a peer, so that causes stay few. ``with_trace`` adds the
        trace of the exception being handled.
        """
        self.flush()
        with self._lock:
            if cause not in self._counts and len(self._counts) >= _MAX_CAUSES:
                cause = _OTHER
            count = self._counts.setdefault(cause, _LogCount(self._clock()))
            if count.written >= self._max_lines:
                count.left_out += 1
                return
            count.written += 1
        self._log.warning("%s", text, exc_info=with_trace)

    def flush(self, *, everything: bool = False) -> None:
        """Write the counts of the intervals that are over, or with ``everything`` of all intervals."""
        now_s = self._clock()
        with self._lock:
            over = [
                (cause, count)
                for cause, count in self._counts.items()
                if everything or now_s - count.since_s >= self._interval_s
            ]
            for cause, _ in over:
                del self._counts[cause]
        for cause, count in over:
            if count.left_out:
                self._log.warning(
                    "%d more were refused within %.0f s, not logged one by one: %s",
                    count.left_out,
                    max(1.0, now_s - count.since_s),
                    cause,
                )
