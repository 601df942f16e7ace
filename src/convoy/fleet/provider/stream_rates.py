"""Measure the rate of an engine's streams as their tokens pass, for heartbeats and so for routing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The share of the counts that is kept at each heartbeat, so that the last few heartbeats count.
_KEPT = 0.5
# Fewer tokens or seconds give no usable rate.
_LEAST_TOKENS, _LEAST_S = 4.0, 0.05


class StreamRates:
    """Measure the streams of one model, on one event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Streams that decode now.
        self._streams = 0
        self._at_s = clock()
        self._tokens = 0.0
        # Seconds of all streams together.
        self._stream_s = 0.0
        # Seconds with at least one stream.
        self._busy_s = 0.0

    def begin(self) -> None:
        """Count a stream as decoding: it has its first token."""
        self._pass()
        self._streams += 1

    def given(self, tokens: int) -> None:
        """Count more tokens of a decoding stream."""
        self._tokens += tokens

    def end(self) -> None:
        """Count a stream as no longer decoding."""
        self._pass()
        self._streams -= 1

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Leave out the time in which a stream waits for its reader: it tells nothing of the engine."""
        self.end()
        try:
            yield
        finally:
            self.begin()

    def beat(self) -> tuple[float, float]:
        """Return the tokens a second of each stream over the last heartbeats, and the mean count of streams.

        Returns 0 and 0 if too few tokens came.
        """
        self._pass()
        found = (0.0, 0.0)
        if self._tokens >= _LEAST_TOKENS and self._busy_s >= _LEAST_S:
            found = self._tokens / self._stream_s, self._stream_s / self._busy_s
        self._tokens *= _KEPT
        self._stream_s *= _KEPT
        self._busy_s *= _KEPT
        return found

    def _pass(self) -> None:
        now_s = self._clock()
        self._stream_s += self._streams * (now_s - self._at_s)
        self._busy_s += (now_s - self._at_s) * (self._streams > 0)
        self._at_s = now_s
