"""Measure how a long prompt affects the streams that run while it is read.

bench/METHODOLOGY.md explains the figures and their limits.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.bench.bare import BLOCK_SIZE
from convoy.bench.report.clock import Deadline
from convoy.bench.report.percentile import percentile
from convoy.bench.throughput import GREEDY, Prompts, Say
from convoy.engine.engine import Engine
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.executor import Executor, Kv, StepResult
from convoy.errors import ConvoyError
from convoy.model.sampling.output_rows import SampleJob
from convoy.transport.link.link import Link, Received
from convoy.wire.messages.control import Step

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class FairOptions:
    """Hold the options: ``num_running`` streams of ``context`` tokens, then a prompt of ``prompt_tokens``."""

    num_running: int = 8
    context: int = 128
    prompt_tokens: int = 8192
    chunk: int = 256
    before_tokens: int = 16

    @property
    def max_tokens(self) -> int:
        """Return the tokens of one stream: enough until the long prompt is read, however short the chunks
        become.
        """
        return self.num_running + self.before_tokens + 8 * -(-self.prompt_tokens // self.chunk) + 64

    @property
    def num_blocks(self) -> int:
        """Return the K/V blocks that hold all sequences, so that none is preempted."""
        stream = -(-(self.context + self.max_tokens) // BLOCK_SIZE) + 1
        return self.num_running * stream + -(-(self.prompt_tokens + 1) // BLOCK_SIZE) + 1


@dataclass(frozen=True, slots=True)
class FairRow:
    """Hold the milliseconds between two tokens of a running stream, before the long prompt and while it is
    read.

    ``mixed_step_ms`` is the median step that had decodes and a chunk, from its submission to its return.
    """

    members: int
    running: int
    prompt_tokens: int
    chunk: int
    before_p50_ms: float
    p50_ms: float
    p99_ms: float
    mixed_step_ms: float
    p99_over_mixed_step: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Hold the time of one step, and the number of its decodes and chunks."""

    submitted_s: float
    seconds: float
    num_decodes: int
    num_chunks: int


class TimedExecutor:
    """Run steps on ``executor``, and keep the time of each from its submission to its return."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._submitted: deque[tuple[float, Step]] = deque()
        self.steps: list[StepTime] = []

    @property
    def depth(self) -> int:
        return self._executor.depth

    @property
    def feeds(self) -> bool:
        return self._executor.feeds

    @property
    def oldest(self) -> int | None:
        return self._executor.oldest

    @property
    def suspects(self) -> tuple[str, ...]:
        return self._executor.suspects

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        self._submitted.append((time.monotonic(), step))
        self._executor.submit(step, jobs)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        submitted_s, step = self._submitted.popleft()
        num_decodes = sum(row.num_tokens == row.num_outputs == 1 for row in step.rows)
        num_chunks = len(step.rows) - num_decodes
        self.steps.append(StepTime(submitted_s, time.monotonic() - submitted_s, num_decodes, num_chunks))
        return result

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        return self._executor.read_blocks(start, end, blocks)

    def write_blocks(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        self._executor.write_blocks(start, blocks, tags, kv)

    def deliver(self, link: Link, received: Received) -> None:
        self._executor.deliver(link, received)

    def lost(self, link: Link, error: ConvoyError) -> None:
        self._executor.lost(link, error)

    def close(self) -> None:
        self._executor.close()


class _Stream:
    """Hold the times of a request's tokens. The engine's thread writes them."""

    def __init__(self, engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.times_s: list[float] = []
        self.error: ConvoyError | None = None
        self.over = threading.Event()
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()
        request = GenerationRequest(prompt, GREEDY, max_tokens=max_tokens, ignore_eos=True)
        self.handle = engine.submit(request, self._listen)

    def wait_for(self, num_tokens: int, deadline: Deadline) -> None:
        while len(self.times_s) < num_tokens:
            if self.error is not None:
                raise self.error
            try:
                self._changed.get(timeout=min(_POLL_S, deadline.left_s()))
            except queue.Empty:
                continue

    def _listen(self, output: Output) -> None:
        if isinstance(output, TokenOutput):
            self.times_s.append(time.monotonic())
        elif isinstance(output, ErrorOutput):
            self.error = output.error
        if isinstance(output, FinishOutput | ErrorOutput):
            self.over.set()
        self._changed.put(None)


def measure_fair(
    engine: Engine,
    timed: TimedExecutor,
    members: int,
    options: FairOptions,
    *,
    vocab_size: int,
    deadline: Deadline,
    say: Say,
) -> FairRow:
    """Start the streams, then the long prompt; measure all until its first token."""
    prompts = Prompts(vocab_size)
    streams = []
    try:
        for _ in range(options.num_running):
            streams.append(_Stream(engine, prompts.next(options.context), options.max_tokens))
        for stream in streams:
            stream.wait_for(1, deadline)
        for stream in streams:
            stream.wait_for(len(stream.times_s) + options.before_tokens, deadline)
        started_s = time.monotonic()
        say(
            f"members {members}: {options.num_running} streams run, a prompt of {options.prompt_tokens} comes"
        )
        long = _Stream(engine, prompts.next(options.prompt_tokens), 1)
        streams.append(long)
        long.wait_for(1, deadline)
        ended_s = long.times_s[0]
        if any(stream.over.is_set() for stream in streams[:-1]):
            raise ConvoyError("a stream ended before the long prompt was read")
    finally:
        for stream in streams:
            stream.handle.abort()
    running = [list(stream.times_s) for stream in streams[:-1]]
    return fair_row(members, options, running, list(timed.steps), (started_s, ended_s))


def fair_row(
    members: int,
    options: FairOptions,
    running: Sequence[Sequence[float]],
    steps: Sequence[StepTime],
    span: tuple[float, float],
) -> FairRow:
    """Return the row of one run.

    ``running`` holds the times of each stream's tokens; ``span`` is the start and end of the long prompt.
    """
    start_s, end_s = span
    # Take as many pauses before the prompt as the option says, so that the start-up of the streams is left
    # out.
    before = _pauses(running, lambda at: at <= start_s)[-options.num_running * options.before_tokens :]
    during = _pauses(running, lambda at: start_s < at <= end_s)
    mixed = [
        1000 * step.seconds
        for step in steps
        if step.num_decodes and step.num_chunks and start_s <= step.submitted_s < end_s
    ]
    if not during or not mixed:
        raise ConvoyError(
            "the long prompt was read before a stream gave a token", hint="ask for a longer prompt"
        )
    p99_ms, mixed_ms = percentile(during, 99), percentile(mixed, 50)
    return FairRow(
        members,
        options.num_running,
        options.prompt_tokens,
        options.chunk,
        round(percentile(before, 50), 3),
        round(percentile(during, 50), 3),
        round(p99_ms, 3),
        round(mixed_ms, 3),
        round(p99_ms / mixed_ms, 3),
        round(end_s - start_s, 3),
    )


def _pauses(streams: Sequence[Sequence[float]], counts: Callable[[float], bool]) -> list[float]:
    """Return the milliseconds between tokens in the order of their ends, for the ends that ``counts``
    accepts.
    """
    pauses = [
        (end, 1000 * (end - start))
        for times_s in streams
        for start, end in itertools.pairwise(times_s)
        if counts(end)
    ]
    return [pause for _, pause in sorted(pauses)]


def fair_ratios(rows: Sequence[FairRow]) -> dict[str, float]:
    """Return the 99th percentile of the pauses over a mixed step's time, by number of members."""
    names = {1: "one_member_p99_over_mixed_step", 2: "two_members_p99_over_mixed_step"}
    return {names[row.members]: row.p99_over_mixed_step for row in rows}
