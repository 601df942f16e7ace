"""A long prompt beside running streams: the rows of each step, and how long a token waits.

The ring is simulated: equal stages, each step costs each of them the same, one step at a time and in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import pytest

from convoy.engine.scheduler import GroupLimits, Scheduled, Scheduler, SchedulerLimits
from convoy.engine.sequence import Sequence, SequenceState
from convoy.model.checkpoints.synthetic import CONFIGS
from convoy.plan.cost import TokenCost
from convoy.plan.spec.model import ModelSpec

COST = TokenCost.of(ModelSpec.from_config(CONFIGS["llama-250m"], "llama-250m"))
LIMITS = SchedulerLimits(groups=(GroupLimits(1024),), block_size=16, prefix_cache=False, cost=COST)
PROMPT = 8192
NUM_STREAMS = 8


@dataclass
class Pass:
    """Describe a step on its way: when each stage is done with it, and its time with an empty ring."""

    scheduled: Scheduled
    done_s: list[float]
    alone_s: float


def scheduled_now(scheduler: Scheduler) -> Scheduled:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled


class Ring:
    """Run a scheduler as the engine does, and tell the time."""

    def __init__(self, limits: SchedulerLimits, num_stages: int) -> None:
        self.scheduler = Scheduler(limits)
        self.now_s = 0.0
        self.steps: list[Pass] = []
        self.told_s: dict[Sequence, list[float]] = {}
        self._num_stages = num_stages
        self._depth = max(limits.micro_batches, limits.max_chunks)
        self._in_flight: deque[Pass] = deque()
        self._free_s = [0.0] * num_stages

    def advance(self) -> None:
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._submit(scheduled)
        if scheduled is None or len(self._in_flight) >= self._depth:
            self._collect()

    def _submit(self, scheduled: Scheduled) -> None:
        stage_s = sum(COST.of_chunk(row.start, row.num_tokens) for row in scheduled.step.rows) / 1000
        at_s, done_s = self.now_s, []
        for stage in range(self._num_stages):
            at_s = self._free_s[stage] = max(at_s, self._free_s[stage]) + stage_s
            done_s.append(at_s)
        self._in_flight.append(Pass(scheduled, done_s, stage_s * self._num_stages))
        self.steps.append(self._in_flight[-1])

    def _collect(self) -> None:
        done = self._in_flight.popleft()
        self.now_s = max(self.now_s, done.done_s[-1])
        self.scheduler.collected(done.scheduled)
        for row, sequence in zip(done.scheduled.step.rows, done.scheduled.sequences, strict=True):
            if row.num_outputs and sequence.state is SequenceState.RUNNING:
                sequence.tokens.append(1)
                self.told_s.setdefault(sequence, []).append(self.now_s)


@pytest.mark.parametrize(
    ("num_stages", "micro_batches", "window"),
    [(1, 1, 0), (2, 2, 0), (2, 2, 8), (3, 3, 0), (3, 3, 16), (2, 3, 0)],
)
@pytest.mark.parametrize("num_streams", [1, NUM_STREAMS])
@pytest.mark.parametrize("level", [True, False])
def test_streams_go_on_while_a_long_prompt_is_read(
    num_stages: int, micro_batches: int, window: int, num_streams: int, level: bool
) -> None:
    limits = replace(LIMITS, micro_batches=micro_batches, prefill_window=window, cost=COST if level else None)
    ring = Ring(limits, num_stages)
    streams = [Sequence((i, i, i), 10_000) for i in range(num_streams)]
    ring.scheduler.add(list(streams))
    while any(len(ring.told_s.get(stream, ())) < 5 for stream in streams):
        ring.advance()
    prompt = Sequence(tuple(i % 97 for i in range(PROMPT)), 4)
    ring.scheduler.add([prompt])
    began, began_s = len(ring.steps), ring.now_s
    while prompt not in ring.told_s:
        ring.advance()
    mixed = [one for one in ring.steps[began:] if prompt in one.scheduled.sequences]
    assert len(mixed) >= PROMPT // limits.prefill_chunk
    for first in range(len(mixed) - micro_batches):
        together = [s for one in mixed[first : first + micro_batches] for s in one.scheduled.sequences]
        if first:  # the first of them was made while streams were still on their way
            assert all(together.count(stream) == 1 for stream in streams), "once in each round of the ring"
    slowest_s = max(one.alone_s for one in mixed)
    pauses = sorted(
        after - before
        for stream in streams
        for before, after in zip(ring.told_s[stream], ring.told_s[stream][1:], strict=False)
        if after > began_s
    )
    assert pauses[int(0.99 * len(pauses))] <= 2 * slowest_s
    if micro_batches == num_stages:
        # the first time it may wait for a chunk that came between
        assert pauses[-1] <= 2 * slowest_s
        assert pauses[int(0.9 * len(pauses))] <= 1.05 * slowest_s, "nobody waits behind more than a round"


def test_the_window_is_open_while_nobody_decodes_and_shut_when_someone_does() -> None:
    scheduler = Scheduler(replace(LIMITS, micro_batches=2, prefill_window=6))
    prompt = Sequence(tuple(range(96)) * 60, 4)
    scheduler.add([prompt])
    ahead = deque(scheduled_now(scheduler) for _ in range(6))
    assert scheduler.schedule() is None, "six chunks are in flight"
    stream = Sequence((1, 2), 50)
    scheduler.add([stream])
    scheduler.collected(ahead.popleft())
    ridden = scheduled_now(scheduler)
    assert set(ridden.sequences) == {prompt, stream}, "who comes rides on the next chunk"
    while ahead:
        assert scheduler.schedule() is None
        scheduler.collected(ahead.popleft())
    scheduler.collected(ridden)
    stream.tokens.append(7)
    assert stream in scheduled_now(scheduler).sequences
    assert stream not in scheduled_now(scheduler).sequences
    assert scheduler.schedule() is None, "two steps are in flight"


def test_chunks_get_shorter_as_attention_grows_and_steps_stay_level() -> None:
    def chunks(limits: SchedulerLimits) -> list[tuple[int, int]]:
        ring = Ring(limits, 1)
        prompt = Sequence(tuple(i % 97 for i in range(PROMPT)), 1)
        ring.scheduler.add([prompt])
        while prompt not in ring.told_s:
            ring.advance()
        return [(r.start, r.num_tokens) for one in ring.steps for r in one.scheduled.step.rows]

    level = chunks(LIMITS)
    sizes = [size for _, size in level]
    assert sizes[0] == 256
    assert sizes == sorted(sizes[:-1], reverse=True) + sizes[-1:]
    assert all(size % 16 == 0 for size in sizes)
    costs = [COST.of_chunk(start, size) for start, size in level[:-1]]
    assert min(costs) > 0.85 * max(costs)
    assert [size for _, size in chunks(replace(LIMITS, cost=None))] == [256] * 32


def chunks_of(limits: SchedulerLimits, num_stages: int, num_tokens: int) -> tuple[list[int], float]:
    """Return the chunks of a prompt that runs alone, and when its first token is told."""
    ring = Ring(limits, num_stages)
    prompt = Sequence(tuple(i % 97 for i in range(num_tokens)), 1)
    ring.scheduler.add([prompt])
    while prompt not in ring.told_s:
        ring.advance()
    return [row.num_tokens for one in ring.steps for row in one.scheduled.step.rows], ring.now_s


@pytest.mark.parametrize(
    ("num_stages", "num_tokens", "chunks"),
    [
        (1, 300, [256, 44]),
        (2, 127, [127]),
        (2, 128, [64, 64]),
        (2, 200, [96, 104]),
        (2, 300, [144, 156]),
        (4, 300, [64, 64, 80, 92]),
        (4, 200, [64, 64, 72]),
        (2, 600, [256, 256, 88]),
    ],
)
def test_a_short_prompt_that_runs_alone_is_cut_so_that_stages_overlap(
    num_stages: int, num_tokens: int, chunks: list[int]
) -> None:
    limits = replace(LIMITS, micro_batches=num_stages, cost=None)
    found, told_s = chunks_of(limits, num_stages, num_tokens)
    assert found == chunks
    _, whole_s = chunks_of(replace(limits, least_chunk=10_000), num_stages, num_tokens)
    assert told_s <= whole_s
    if num_stages > 1 and 127 < num_tokens <= 300:
        assert told_s < 0.85 * whole_s


def test_a_prompt_that_does_not_run_alone_or_whose_chunks_wait_for_each_other_is_not_cut() -> None:
    two = replace(LIMITS, micro_batches=2)
    beside = Scheduler(two)
    beside.add([Sequence(tuple(range(200)), 4), Sequence(tuple(range(200)), 4)])
    assert [row.num_tokens for row in scheduled_now(beside).step.rows] == [200, 200]
    one_after_another = Scheduler(replace(two, prefill_window=1))
    one_after_another.add([Sequence(tuple(range(200)), 4)])
    assert [row.num_tokens for row in scheduled_now(one_after_another).step.rows] == [200]


def test_one_at_a_time_is_one_at_a_time() -> None:
    scheduler = Scheduler(replace(LIMITS, max_batch=1, micro_batches=2))
    first, second = Sequence((1, 2), 3), Sequence((3, 4), 3)
    scheduler.add([first, second])
    order: list[Sequence] = []
    while first.state is not SequenceState.FINISHED or second.state is not SequenceState.FINISHED:
        scheduled = scheduler.schedule()
        if scheduled is None or not scheduled.sequences:
            continue
        assert len(scheduled.sequences) == 1
        order += scheduled.sequences
        scheduler.collected(scheduled)
        order[-1].tokens.append(5)
        if order[-1].num_generated == 3:
            scheduler.finish(order[-1])
    assert order == [first] * 3 + [second] * 3
