"""Measure tokens per second of a running engine: many requests that decode at once, and one long prompt.

bench/METHODOLOGY.md explains the figures and their limits.
"""

from __future__ import annotations

import queue
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.bench.bare import BLOCK_SIZE
from convoy.bench.report.clock import Deadline
from convoy.bench.report.report import DecodeRow, PrefillRow
from convoy.engine.completion import generate
from convoy.engine.engine import Engine, RequestHandle
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import ConvoyError
from convoy.model.sampling.params import SamplingParams

Say = Callable[[str], None]
_SPARE_TOKENS = 64
# The tokens by which a prompt is longer in its next turn.
TURN_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Hold the options: each count gets ``num_windows`` windows of ``window_tokens`` tokens per request."""

    concurrent: tuple[int, ...] = (1, 4, 16, 32)
    context: int = 512
    num_windows: int = 5
    window_tokens: int = 8
    prefill_chunk: int = 256

    @property
    def max_tokens(self) -> int:
        """Return the tokens of one request until it is ended.

        Early requests decode while later prompts are read.
        """
        prefill = max(self.concurrent) * -(-self.context // self.prefill_chunk)
        measured = len(self.concurrent) * (self.num_windows + 2) * self.window_tokens
        return prefill + measured + _SPARE_TOKENS

    @property
    def num_blocks(self) -> int:
        """Return the K/V blocks that hold all requests, so that none is preempted."""
        return max(self.concurrent) * (-(-(self.context + self.max_tokens) // BLOCK_SIZE) + 1)


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """Hold the options: ``num_rounds`` prompts of ``num_tokens``, in steps of ``chunk``, ``window`` in
    flight.
    """

    num_tokens: int
    chunk: int
    window: int
    num_rounds: int


def measure_decode(
    engine: Engine, vocab_size: int, members: int, options: DecodeOptions, *, deadline: Deadline, say: Say
) -> list[DecodeRow]:
    """Read all prompts once, then measure decodes: the most requests first, ending some before each lower
    count.
    """
    prompts = Prompts(vocab_size)
    crowd = Crowd(engine, deadline)
    rows = []
    try:
        sizes = sorted(set(options.concurrent), reverse=True)
        say(f"members {members}: {sizes[0]} prompts of {options.context} tokens are read")
        crowd.start([prompts.next(options.context) for _ in range(sizes[0])], options.max_tokens)
        for size in sizes:
            crowd.shrink(size)
            # This window is not measured: it warms the caches and drains the steps of the count before.
            crowd.window(options.window_tokens)
            rates = [crowd.window(options.window_tokens) for _ in range(options.num_windows)]
            rate = statistics.median(rates)
            context = options.context + crowd.longest
            rows.append(DecodeRow(members, size, context, round(rate, 2), round(1000 * size / rate, 3)))
            say(f"members {members}: {size} at once decode {rate:.1f} tokens/s")
    finally:
        crowd.shrink(0)
    return rows[::-1]


def measure_prefill(
    engine: Engine, vocab_size: int, members: int, options: PrefillOptions, *, deadline: Deadline, say: Say
) -> PrefillRow:
    """Return the median of some prompts, one after the other, each with its next turn behind it.

    No prompt begins like another.
    """
    prompts = Prompts(vocab_size)
    cold: list[_Wait] = []
    warm: list[_Wait] = []
    for number in range(options.num_rounds):
        prompt = prompts.next(options.num_tokens)
        for waits, asked in ((cold, prompt), (warm, (*prompt, *prompts.next(TURN_TOKENS)))):
            deadline.left_s()
            waits.append(_wait(engine, asked))
        say(
            f"members {members}: prompt {number + 1} of {options.num_rounds} in chunks of {options.chunk}, "
            f"{options.window} in flight: {cold[-1].seconds:.2f} s, its next turn {warm[-1].seconds:.2f} s"
        )
    median = statistics.median(wait.seconds for wait in cold)
    return PrefillRow(
        members,
        options.num_tokens,
        options.chunk,
        options.window,
        round(median, 4),
        round(options.num_tokens / median, 2),
        round(statistics.median(wait.seconds for wait in warm), 4),
        round(min(wait.cached for wait in warm), 4),
    )


@dataclass(frozen=True, slots=True)
class _Wait:
    """Hold the seconds to the first token of a prompt, and the share of it that was cached."""

    seconds: float
    cached: float


def _wait(engine: Engine, prompt: tuple[int, ...]) -> _Wait:
    before = engine.stats().hit_tokens
    answer = generate(engine, GenerationRequest(prompt, GREEDY, max_tokens=1, ignore_eos=True))
    return _Wait(answer.time_to_first_token_s, (engine.stats().hit_tokens - before) / len(prompt))


class Prompts:
    """Draw random prompts, all different, so that no prefix is shared. They are the same in every run."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(1)  # noqa: S311 - not a secret
        self._vocab_size = vocab_size

    def next(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab_size) for _ in range(num_tokens))


class Crowd:
    """Run requests until they are ended, and collect the times of their tokens."""

    def __init__(self, engine: Engine, deadline: Deadline) -> None:
        self._engine = engine
        self._deadline = deadline
        self._outputs: queue.SimpleQueue[tuple[int, float, Output]] = queue.SimpleQueue()
        self._running: list[tuple[int, RequestHandle]] = []
        # The numbers of the requests that run.
        self._numbers: set[int] = set()
        self._counts: dict[int, int] = {}

    @property
    def longest(self) -> int:
        """Return the tokens of the request with the most tokens."""
        return max(self._counts.values())

    def start(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
        """Start all requests, and return when each has one token."""
        for number, prompt in enumerate(prompts):
            request = GenerationRequest(prompt, GREEDY, max_tokens=max_tokens, ignore_eos=True)
            self._numbers.add(number)
            self._running.append((number, self._engine.submit(request, self._listener(number))))
        while len(self._counts) < len(prompts):
            self._next()

    def shrink(self, size: int) -> None:
        """End all but the first ``size`` requests."""
        ended, self._running = self._running[size:], self._running[:size]
        self._numbers = {number for number, _ in self._running}
        for _, handle in ended:
            handle.abort()
        if self._running:
            # Drain the tokens of steps that were in flight.
            self.window(1)

    def window(self, num_tokens: int) -> float:
        """Return the tokens per second of all requests together, over ``num_tokens`` of each.

        Tokens come in bursts, one for each step. So a window begins and ends at the same place of a burst.
        """
        while not self._outputs.empty():
            self._next()
        # The window begins with a token, so that the wait before it does not count.
        started_s = self._next()
        ended_s = started_s
        for _ in range(num_tokens * len(self._running)):
            ended_s = self._next()
        return num_tokens * len(self._running) / (ended_s - started_s)

    def _listener(self, number: int) -> Callable[[Output], None]:
        def listen(output: Output) -> None:
            self._outputs.put((number, time.monotonic(), output))

        return listen

    def _next(self) -> float:
        """Return the time of the next token of a running request.

        Raises the error that ended one too early.
        """
        running = self._numbers
        while True:
            try:
                number, time_s, output = self._outputs.get(timeout=self._deadline.left_s())
            except queue.Empty:
                # `left_s` raises once the deadline has passed.
                continue
            if isinstance(output, ErrorOutput):
                raise output.error
            if number not in running:
                continue
            if isinstance(output, FinishOutput):
                raise ConvoyError("a request ended before it was measured")
            if isinstance(output, TokenOutput):
                self._counts[number] = self._counts.get(number, 0) + 1
                return time_s
