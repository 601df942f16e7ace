"""Measure one decode without an engine: steps made by hand, over any executor.

Over the stages of one process that is the bare loop: no scheduler, no threads, no text. Over the members'
ring it is the cost of members and links, and nothing else.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from convoy.bench.report.clock import Deadline
from convoy.bench.report.percentile import percentile
from convoy.bench.report.report import STAGE, DecodeRow, StepRow
from convoy.engine.kv.prefix import PrefixTags
from convoy.engine.run.executor import StepResult
from convoy.model.backends.host.checks.selfcheck import choose_kernel
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.output_rows import GREEDY, SampleJob, sample_all
from convoy.model.stage import StageOptions
from convoy.model.tensors import tokens_from_bytes
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

BLOCK_SIZE = 16
_CHUNK = 256


class Steps(Protocol):
    """Declare the part of an `Executor` that a bare decode needs."""

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None: ...

    def collect(self) -> StepResult: ...


class InTurn:
    """Run the stages of a plan one after the other in this process, without links."""

    def __init__(self, stages: Sequence[HostStage]) -> None:
        self._stages = list(stages)
        self._owner = next(stage for stage in stages if stage.assignment.output)
        self.kernel = self._owner.options.kernel
        self._results: deque[StepResult] = deque()

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        first, *others = self._stages
        hidden = first.run(step, hidden=None, tokens=tokens_from_bytes(step.tokens))
        for stage in others:
            hidden = stage.run(step, hidden=hidden, tokens=None)
        logits = self._owner.output(first.select(step, hidden))
        outcomes = sample_all(logits.numpy().astype(np.float32, copy=False), jobs)
        self._results.append(StepResult(step.number, outcomes))

    def collect(self) -> StepResult:
        return self._results.popleft()


def load_in_turn(
    source: ModelSource,
    assignments: Sequence[StageAssignment],
    kernel: str,
    num_threads: int,
    max_tokens: int,
) -> InTurn:
    """Load every stage of a plan into this process, with room for one sequence."""
    chosen = choose_kernel(kernel, num_threads)
    options = StageOptions(kernel=chosen, block_size=BLOCK_SIZE, num_threads=num_threads)
    stages = [HostStage.load(source, assignment, options) for assignment in assignments]
    for stage in stages:
        stage.make_pools(num_blocks(max_tokens))
    return InTurn(stages)


def whole(source: ModelSource) -> list[StageAssignment]:
    """Return the assignment of the whole model to one stage."""
    return [StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)]


def num_blocks(max_tokens: int) -> int:
    """Return the K/V blocks that hold ``max_tokens``."""
    return -(-max_tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Window:
    """Hold the seconds of each step, in order."""

    seconds: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return len(self.seconds) / sum(self.seconds)


class BareDecode:
    """Decode one sequence on an executor that runs nothing else."""

    def __init__(self, executor: Steps, vocab_size: int, max_tokens: int, deadline: Deadline) -> None:
        self._executor = executor
        self._vocab_size = vocab_size
        self._grants = [BlockGrant.append(0, 0, list(range(num_blocks(max_tokens))))]
        self._deadline = deadline
        self._number = self._next = 0
        self._tags = PrefixTags(BLOCK_SIZE)
        self._chain = [self._tags.root(b"")]
        self._tokens: list[int] = []

    def read(self, num_tokens: int) -> None:
        """Run the prompt, in chunks. Its last token gives the first token of the answer."""
        rng = random.Random(1)  # noqa: S311 - not a secret
        prompt = [rng.randrange(self._vocab_size) for _ in range(num_tokens)]
        for start in range(0, num_tokens, _CHUNK):
            chunk = prompt[start : start + _CHUNK]
            self._run(chunk, num_outputs=int(start + len(chunk) == num_tokens))

    def window(self, num_tokens: int) -> Window:
        """Decode ``num_tokens``, one a step."""
        seconds = []
        for _ in range(num_tokens):
            started_s = time.perf_counter()
            self._run([self._next], num_outputs=1)
            seconds.append(time.perf_counter() - started_s)
        return Window(tuple(seconds))

    def _run(self, tokens: list[int], num_outputs: int) -> None:
        # `left_s` raises at the deadline, so that no run exceeds its time by more than one step.
        self._deadline.left_s()
        start, end = len(self._tokens), len(self._tokens) + len(tokens)
        self._tokens += tokens
        tags = self._tags.of_row(self._chain, self._tokens, start, end, num_outputs)
        row = Row(0, start, len(tokens), num_outputs, *tags)
        encoded = np.array(tokens, dtype="<u4").tobytes()
        self._executor.submit(Step(self._number, [], self._grants, [row], encoded), [GREEDY] * num_outputs)
        outcomes = self._executor.collect().outcomes
        self._grants = []
        self._number += 1
        if outcomes:
            self._next = outcomes[0].sampled.token_id


def step_row(through: str, num_hops: int, windows: Sequence[Window]) -> StepRow:
    """Return the percentiles over all steps of all windows."""
    ms = [1000 * second for window in windows for second in window.seconds]
    return StepRow(through, num_hops, round(percentile(ms, 50), 4), round(percentile(ms, 99), 4))


def solo_row(windows: Sequence[Window], context_tokens: int) -> DecodeRow:
    """Return the median of the windows, in the form of the other benches' rows."""
    rate = statistics.median(window.tokens_per_s for window in windows)
    return DecodeRow(1, 1, context_tokens, round(rate, 2), round(1000 / rate, 3), STAGE)
