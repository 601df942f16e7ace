"""What an engine counts, and when a step last passed every stage."""

from __future__ import annotations

import time

from convoy.engine.histogram import Histogram
from convoy.engine.request_counts import STEP_S, RequestCounts
from convoy.errors import NotReady


class EngineProgress:
    """Not thread-safe: the engine holds a lock. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.session_tokens = 0
        self.recoveries = 0
        self.requests = RequestCounts()
        self.step_s = Histogram(STEP_S)  # of steps with rows, through every stage
        self.ring_s: float | None = None  # how long the last empty step took
        self._last_step_s: float | None = None

    def passed(self, submitted_s: float, *, is_empty: bool) -> None:
        """A step came back."""
        self._last_step_s = time.monotonic()
        self.num_steps += 1
        if is_empty:
            self.ring_s = self._last_step_s - submitted_s
        else:
            self.step_s.observe(self._last_step_s - submitted_s)

    def warmed_up(self) -> None:
        """What was asked and said until now was no client's."""
        self.prompt_tokens = self.generated_tokens = 0
        self.requests.reset()
        self.step_s = Histogram(STEP_S)

    def other_stages(self) -> None:
        """No step has passed the stages that run from now on."""
        self._last_step_s = None

    def check_recent(self, limit_s: float) -> None:
        """Raises `NotReady` unless a step passed every stage within the limit."""
        if self._last_step_s is None:
            text = "no token has passed every stage yet"
            raise NotReady(text, public=text)
        age_s = time.monotonic() - self._last_step_s
        if age_s > limit_s:
            text = f"the last step passed every stage {age_s:.0f} s ago, and {limit_s:g} s is the limit"
            raise NotReady(text, public=text)
