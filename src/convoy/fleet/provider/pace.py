"""What an engine gives its streams, measured where their tokens pass: for heartbeats, and so for routing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_KEPT = 0.5  # of what was counted, at each heartbeat: the last few count
_LEAST_TOKENS, _LEAST_S = 4.0, 0.05  # fewer say nothing


class StreamRates:
    """Of one model's streams, on one event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._streams = 0  # that decode now
        self._at_s = clock()
        self._tokens = 0.0
        self._stream_s = 0.0  # of all streams together
        self._busy_s = 0.0  # with one stream or more

    def begin(self) -> None:
        """A stream has its first token: from here on it decodes."""
        self._pass()
        self._streams += 1

    def given(self, tokens: int) -> None:
        """More of a stream that decodes."""
        self._tokens += tokens

    def end(self) -> None:
        """A stream that decoded does not, any more."""
        self._pass()
        self._streams -= 1

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """A stream that decodes waits for its reader, which says nothing of its engine."""
        self.end()
        try:
            yield
        finally:
            self.begin()

    def beat(self) -> tuple[float, float]:
        """Tokens a second that each stream got over the last heartbeats, and how many there were at once in
        the mean; 0 and 0 where too few came to say.
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
