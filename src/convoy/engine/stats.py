"""What requests came to, and how long they took: counted where it happens, and read by whoever scrapes.

Bounds and meanings are those of vLLM's metrics of the same names (`vllm/v1/metrics/loggers.py`), so that
panels made for it show the same things here.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from convoy.errors import NotReady


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """``cumulative[i]`` values were at most ``bounds[i]``; its last entry, one more, counts all."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return self.cumulative[-1]


class Histogram:
    """Thread-safe: whoever reads sees each value whole or not at all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: ascending; what is above the last is counted too."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def snapshot(self) -> HistogramCounts:
        with self._lock:
            counts, total = tuple(self._counts), self._sum
        return HistogramCounts(self._bounds, tuple(accumulate(counts)), total)


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


FINISHES = ("stop", "length", "abort", "error")
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class RequestSums:
    """A snapshot. Tokens of prompts are counted once per request, everything else once per choice."""

    prompt_tokens: int
    finished: Mapping[str, int]  # by `FINISHES`
    first_token: HistogramCounts
    between_tokens: HistogramCounts
    queued: HistogramCounts
    whole: HistogramCounts


class RequestCounts:
    """Not thread-safe: the engine holds a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """What was until now was no client's."""
        self.prompt_tokens = 0
        self.finished = dict.fromkeys(FINISHES, 0)
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.between_tokens = Histogram(_BETWEEN_TOKENS_S)
        self.queued = Histogram(_REQUEST_S)
        self.whole = Histogram(_REQUEST_S)

    def snapshot(self) -> RequestSums:
        return RequestSums(
            self.prompt_tokens,
            dict(self.finished),
            self.first_token.snapshot(),
            self.between_tokens.snapshot(),
            self.queued.snapshot(),
            self.whole.snapshot(),
        )


class ChoiceMeter:
    """One choice from its arrival to its end. Its times are counted once it has ended by itself."""

    def __init__(self, counts: RequestCounts, num_prompt: int) -> None:
        """``num_prompt``: tokens to count once they have run; 0 where another choice counts them."""
        self._counts = counts
        self._num_prompt = num_prompt
        self._arrived_s = counts.clock()
        self._queued_s: float | None = None
        self._last_s: float | None = None

    def admitted(self) -> None:
        """A step carries it; the first call counts."""
        if self._queued_s is None:
            self._queued_s = self._counts.clock() - self._arrived_s

    @property
    def queued_s(self) -> float:
        """How long it waited, once it does not any more."""
        return self._queued_s or 0.0

    def advanced(self) -> None:
        """A step brought it one token or, with guesses, several."""
        counts, now_s = self._counts, self._counts.clock()
        if self._last_s is None:
            counts.prompt_tokens += self._num_prompt
            counts.first_token.observe(now_s - self._arrived_s)
        else:
            counts.between_tokens.observe(now_s - self._last_s)
        self._last_s = now_s

    def finished(self, why: str) -> None:
        """``why``: of `FINISHES`."""
        counts = self._counts
        counts.finished[why] += 1
        if why in {"stop", "length"}:
            counts.whole.observe(counts.clock() - self._arrived_s)
            counts.queued.observe(self._queued_s or 0.0)
