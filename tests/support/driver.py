"""Run sequences over an executor by hand and keep every logit, to compare two executors bit by bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from convoy.engine.run.executor import Executor
from convoy.engine.scheduler import Scheduled, Scheduler, SchedulerLimits
from convoy.engine.sequence import Sequence, SequenceState
from convoy.model.sampling.output_rows import GREEDY as GREEDY_JOB
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.95, seed=seed)


@dataclass
class Run:
    """Hold one sequence's tokens and the logits from which each was sampled."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)


class Driver:
    """Own a scheduler for the whole life of an executor, so that step numbers continue."""

    def __init__(self, executor: Executor, limits: SchedulerLimits) -> None:
        self._executor = executor
        self._scheduler = Scheduler(limits)

    @property
    def num_preempted(self) -> int:
        return self._scheduler.num_preempted

    @property
    def num_cached_tokens(self) -> int:
        return self._scheduler.num_cached_tokens

    def run(self, prompts: SequenceOf[tuple[tuple[int, ...], SamplingParams]], num_tokens: int) -> list[Run]:
        runs = {Sequence(prompt, num_tokens): Run(prompt, params) for prompt, params in prompts}
        self._scheduler.add(list(runs))
        in_flight: deque[Scheduled] = deque()
        while in_flight or any(s.state is not SequenceState.FINISHED for s in runs):
            scheduled = self._scheduler.schedule()
            if scheduled is not None:
                self._executor.submit(scheduled.step, _samples(scheduled, runs))
                in_flight.append(scheduled)
            if scheduled is None or len(in_flight) >= self._executor.depth:
                self._commit(in_flight.popleft(), runs)
        return list(runs.values())

    def _commit(self, scheduled: Scheduled, runs: dict[Sequence, Run]) -> None:
        result = self._executor.collect()
        assert result.number == scheduled.step.number
        self._scheduler.collected(scheduled)
        offset = 0
        for row, sequence in zip(scheduled.step.rows, scheduled.sequences, strict=True):
            offset += row.num_outputs
            if not row.num_outputs or sequence.state is SequenceState.FINISHED:
                continue
            run = runs[sequence]
            outcome = result.outcomes[offset - 1]
            assert outcome.logits is not None
            assert outcome.error is None
            run.tokens.append(outcome.sampled.token_id)
            run.logits.append(outcome.logits)
            sequence.tokens.append(outcome.sampled.token_id)
            if sequence.num_generated >= sequence.max_tokens:
                self._scheduler.finish(sequence)


def _samples(scheduled: Scheduled, runs: dict[Sequence, Run]) -> list[SampleJob]:
    samples = []
    for row, sequence in zip(scheduled.step.rows, scheduled.sequences, strict=True):
        run = runs[sequence]
        history = (run.prompt, list(run.tokens))
        last = SampleJob(run.params, 0, len(sequence.tokens), *history, wants_logits=True)
        samples.extend([GREEDY_JOB] * (row.num_outputs - 1) + [last] * bool(row.num_outputs))
    return samples


def assert_equal_to_the_bit(expected: SequenceOf[Run], found: SequenceOf[Run]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert one.tokens == other.tokens
        differences = [np.abs(a - b).max() for a, b in zip(one.logits, other.logits, strict=True)]
        assert max(differences) == 0.0
