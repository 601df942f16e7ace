"""Counts of requests and histograms of their times, updated by the engine and read by metrics scrapers.

Bounds and meanings are those of vLLM's metrics of the same names (`vllm/v1/metrics/loggers.py`), so that
dashboards made for vLLM show the same things here.
"""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from convoy.config.table import HOST_CHUNK
from convoy.errors import NotReady


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """Hold a histogram's snapshot.

    ``cumulative[i]`` values were at most ``bounds[i]``; the one further entry at its end counts all values.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return self.cumulative[-1]


class Histogram:
    """Count values by bucket. Thread-safe: a reader sees each value wholly or not at all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Create empty buckets with ascending ``bounds``; values above the last bound are counted too."""
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
    """Count steps, tokens and recoveries. Not thread-safe: the engine holds a lock. Times are monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.session_tokens = 0
        self.recoveries = 0
        self.requests = RequestCounts()
        # Of steps with rows, through every stage.
        self.step_s = Histogram(STEP_S)
        # How long the last empty step took.
        self.ring_s: float | None = None
        self._last_step_s: float | None = None
        self._lone_s: deque[float] = deque(maxlen=_LONE_STEPS)
        # Tokens a second of the last steps with long chunks.
        self._chunk_rates: deque[float] = deque(maxlen=_CHUNK_STEPS)

    def passed(self, submitted_s: float, *, num_sequences: int, num_tokens: int) -> None:
        """Record a step that came back."""
        before_s, now_s = self._last_step_s, self._clock()
        self._last_step_s = now_s
        self.num_steps += 1
        if not num_sequences:
            self.ring_s = now_s - submitted_s
            return
        self.step_s.observe(now_s - submitted_s)
        # Where steps overlap, the next one is submitted before the last one is back.
        took_s = now_s - max(submitted_s, before_s or 0.0)
        if num_sequences == num_tokens == 1:
            self._lone_s.append(took_s)
        if num_tokens - num_sequences >= _LONG_CHUNK:
            self._chunk_rates.append(num_tokens / max(took_s, 1e-6))

    def tokens_in(self, seconds: float) -> int | None:
        """Return how many tokens of a chunk pass in a time, as measured; None before some chunks did."""
        if len(self._chunk_rates) < _CHUNK_STEPS:
            return None
        return int(statistics.median(self._chunk_rates) * seconds)

    @property
    def lone_step_s(self) -> float | None:
        """Return the middle time of the last steps with one token alone; None before the first."""
        return statistics.median(self._lone_s) if self._lone_s else None

    def warmed_up(self) -> None:
        """Reset the counters after the warm-up, because no client caused it."""
        self.prompt_tokens = self.generated_tokens = 0
        self.requests.reset()
        self.step_s = Histogram(STEP_S)
        self._lone_s.clear()

    def other_stages(self) -> None:
        """Forget the last steps: none has passed the new stages yet."""
        self._last_step_s = None
        self._lone_s.clear()
        self._chunk_rates.clear()

    def check_recent(self, limit_s: float) -> None:
        """Raise `NotReady` unless a step passed every stage within the last ``limit_s`` seconds."""
        if self._last_step_s is None:
            text = "no token has passed every stage yet"
            raise NotReady(text, public=text)
        age_s = self._clock() - self._last_step_s
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
# Steps whose middle time is told.
_LONE_STEPS = 15
# Steps whose middle rate limits chunks, and the least tokens of their chunks. The least chunk that a limit
# leaves must count, or a slow moment would keep the limit there. Several prompts may share it.
_CHUNK_STEPS = 5
_LONG_CHUNK = HOST_CHUNK // 2
STEP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class RequestSums:
    """Hold a snapshot of `RequestCounts`.

    Prompt tokens are counted once for each request, and everything else once for each choice.
    """

    prompt_tokens: int
    # Keys are those of `FINISHES`.
    finished: Mapping[str, int]
    first_token: HistogramCounts
    between_tokens: HistogramCounts
    queued: HistogramCounts
    whole: HistogramCounts


class RequestCounts:
    """Count requests and their times. Not thread-safe: the engine holds a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """Start all counts from zero."""
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
    """Time one choice from its arrival to its end. Its times are counted if it ends by itself."""

    def __init__(self, counts: RequestCounts, num_prompt: int) -> None:
        """Start the clock.

        ``num_prompt`` tokens are counted once they have run; 0 if another choice counts them.
        """
        self._counts = counts
        self._num_prompt = num_prompt
        self._arrived_s = counts.clock()
        self._queued_s: float | None = None
        self._last_s: float | None = None

    def admitted(self) -> None:
        """Record that a step carries the choice; only the first call counts."""
        if self._queued_s is None:
            self._queued_s = self._counts.clock() - self._arrived_s

    @property
    def queued_s(self) -> float:
        """Return how long the choice waited, in seconds; 0.0 while it still waits."""
        return self._queued_s or 0.0

    def advanced(self) -> None:
        """Record that a step brought one token or, with guesses, several."""
        counts, now_s = self._counts, self._counts.clock()
        if self._last_s is None:
            counts.prompt_tokens += self._num_prompt
            counts.first_token.observe(now_s - self._arrived_s)
        else:
            counts.between_tokens.observe(now_s - self._last_s)
        self._last_s = now_s

    def finished(self, why: str) -> None:
        """Record the end of the choice; ``why`` is one of `FINISHES`."""
        counts = self._counts
        counts.finished[why] += 1
        if why in {"stop", "length"}:
            counts.whole.observe(counts.clock() - self._arrived_s)
            counts.queued.observe(self._queued_s or 0.0)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Hold a snapshot for people and metrics."""

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    # Tokens that sessions asked to run, replayed ones included.
    session_tokens: int
    preempted: int
    # Positions that did not run, because their K/V was there.
    cached_tokens: int
    # Guesses that ran.
    drafted_tokens: int
    # Guesses that were right, and so became generated tokens.
    accepted_tokens: int
    # How long the last empty step took to pass every stage, in seconds.
    ring_s: float | None
    # How often other stages took over after a loss.
    recoveries: int
    # The owned share of the fullest cache group's blocks, from 0 to 1.
    kv_usage: float
    # Tokens looked up in the prefix cache at first admissions, and those that it had.
    queried_tokens: int
    hit_tokens: int
    requests: RequestSums
    # Of steps with rows, from submission to collection.
    step_s: HistogramCounts
    # Tokens after a replay where another token was as likely; see `engine.requests.near_tie`.
    near_ties: int = 0
    # The middle time of the last steps with one token alone.
    lone_step_s: float | None = None
