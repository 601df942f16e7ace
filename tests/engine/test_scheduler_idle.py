"""Sequences with nothing to run: the blocks they keep, and the sequences that come before them."""

from dataclasses import replace

from convoy.engine.scheduler import GroupLimits, Scheduled, Scheduler, SchedulerLimits
from convoy.engine.sequence import Sequence, SequenceState

LIMITS = SchedulerLimits(
    groups=(GroupLimits(8),), block_size=4, max_batch=2, max_step_tokens=16, prefill_chunk=16, max_waiting=8
)


def run_once(scheduler: Scheduler) -> Scheduled | None:
    scheduled = scheduler.schedule()
    if scheduled is not None:
        scheduler.collected(scheduled)
    return scheduled


def idle_sequence(scheduler: Scheduler, num_tokens: int, first: int = 0) -> Sequence:
    """Make a sequence that ran all it has, and rests."""
    sequence = Sequence(tuple(range(first, first + num_tokens)), 0)
    scheduler.add([sequence])
    run_once(scheduler)
    assert not sequence.num_pending
    scheduler.rest(sequence)
    return sequence


def test_an_idle_sequence_keeps_its_blocks_and_goes_on_where_it_was() -> None:
    scheduler = Scheduler(LIMITS)
    sequence = idle_sequence(scheduler, 6)
    scheduler.check()
    assert sequence.state is SequenceState.IDLE
    assert scheduler.schedule() is None
    sequence.tokens.append(9)
    scheduled = run_once(scheduler)
    assert scheduled is not None
    assert [(row.start, row.num_tokens, row.num_outputs) for row in scheduled.step.rows] == [(6, 1, 1)]


def test_idle_sequences_take_no_place_in_the_batch() -> None:
    scheduler = Scheduler(LIMITS)
    idle = [idle_sequence(scheduler, 3, first) for first in (0, 10, 20)]
    requests = [Sequence((first,), 4) for first in (30, 40, 50)]
    scheduler.add(requests)
    assert run_once(scheduler) is not None
    assert scheduler.running == requests[:2]
    idle[0].tokens.append(9)
    assert scheduler.schedule() is None, "both places are taken"
    scheduler.finish(requests[0])
    run_once(scheduler)
    assert scheduler.running == [requests[1], idle[0]]


def test_a_request_that_waits_for_blocks_gets_those_of_who_idled_longest() -> None:
    scheduler = Scheduler(LIMITS)
    first, second = idle_sequence(scheduler, 12), idle_sequence(scheduler, 12, 20)
    request = Sequence(tuple(range(40, 52)), 4)
    scheduler.add([request])
    scheduled = run_once(scheduler)
    assert scheduled is not None
    assert scheduled.sequences == (request,)
    assert (first.state, second.state) == (SequenceState.FINISHED, SequenceState.IDLE)
    assert scheduler.num_preempted == 1
    scheduler.check()


def test_who_runs_takes_blocks_of_who_idles_before_those_of_who_runs() -> None:
    scheduler = Scheduler(LIMITS)
    runs = [Sequence(tuple(range(first, first + 8)), 9) for first in (0, 20)]
    scheduler.add(runs)
    run_once(scheduler)
    idle = idle_sequence(replace_limit(scheduler, 3), 7, 40)
    for sequence in runs:
        sequence.tokens.extend([1, 1, 1, 1])
    assert scheduler.pools.num_free == 2
    run_once(scheduler)
    runs[0].tokens.extend([2, 2, 2, 2])
    run_once(scheduler)
    assert idle.state is SequenceState.FINISHED
    assert all(sequence.state is SequenceState.RUNNING for sequence in runs)
    scheduler.check()


def replace_limit(scheduler: Scheduler, max_batch: int) -> Scheduler:
    scheduler.limits = replace(scheduler.limits, max_batch=max_batch)
    return scheduler


def test_one_that_was_preempted_before_it_came_to_rest_is_finished() -> None:
    scheduler = Scheduler(LIMITS)
    sequence = Sequence(tuple(range(6)), 0)
    scheduler.add([sequence])
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.preempt(sequence)
    scheduler.collected(scheduled)
    scheduler.rest(sequence)
    assert sequence.state is SequenceState.FINISHED
    assert not scheduler.waiting
    scheduler.check()


def test_a_new_beginning_on_other_stages_ends_who_idles_and_keeps_who_was_woken() -> None:
    scheduler = Scheduler(LIMITS)
    idle, woken = idle_sequence(scheduler, 5), idle_sequence(scheduler, 5, 20)
    woken.tokens.append(7)
    scheduler.reset(LIMITS)
    assert idle.state is SequenceState.FINISHED
    assert list(scheduler.waiting) == [woken]
    scheduled = run_once(scheduler)
    assert scheduled is not None
    assert scheduled.step.rows[0].num_tokens == 6
    assert not scheduled.step.released
    scheduler.rest(woken)
    scheduler.finish(woken)
    scheduler.check()


def test_one_that_fills_the_pool_to_the_last_place_runs() -> None:
    scheduler = Scheduler(replace(LIMITS, max_step_tokens=64, prefill_chunk=64))
    idle_sequence(scheduler, 32)
    scheduler.check()
    assert scheduler.pools.num_free == 0
