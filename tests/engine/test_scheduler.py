"""The scheduler decides with integers alone, so it is tested with integers alone."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.engine.scheduler import GroupLimits, Scheduled, Scheduler, SchedulerLimits
from convoy.engine.sequence import Sequence, SequenceState
from convoy.errors import QueueFull, RequestError

LIMITS = SchedulerLimits(
    prefill_window=8,
    groups=(GroupLimits(32),),
    block_size=4,
    max_batch=4,
    max_step_tokens=16,
    prefill_chunk=8,
    max_waiting=8,
)


def make_sequence(num_prompt: int, max_tokens: int = 8, first: int = 0) -> Sequence:
    return Sequence(tuple(range(first, first + num_prompt)), max_tokens)


def collect(scheduler: Scheduler, scheduled: Scheduled, token: int = 99) -> None:
    """Collect a step as the engine does: each row with an output yields a token."""
    scheduler.collected(scheduled)
    for row, sequence in zip(scheduled.step.rows, scheduled.sequences, strict=True):
        if row.num_outputs and sequence.state is not SequenceState.FINISHED:
            sequence.tokens.append(token)
            if sequence.num_generated >= sequence.max_tokens:
                scheduler.finish(sequence)


def scheduled_now(scheduler: Scheduler) -> Scheduled:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled


def test_chunks_beside_decodes_are_as_long_as_the_measured_rate_allows() -> None:
    limits = SchedulerLimits(
        groups=(GroupLimits(1024),), block_size=4, max_step_tokens=2048, prefill_chunk=2048, chunk_s=0.1
    )
    scheduler = Scheduler(limits)
    first = Sequence((1, 2), max_tokens=9)
    scheduler.add([first])
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.collected(scheduled)
    first.tokens.append(3)
    sizes = []
    for begin, measured in ((0, 700), (1000, 10), (2000, None)):
        scheduler.chunk_beside_decodes = measured
        prompt = Sequence(tuple(range(begin, begin + 1000)), max_tokens=1)
        scheduler.add([prompt])
        scheduled = scheduler.schedule()
        assert scheduled is not None
        sizes.append([row.num_tokens for row in scheduled.step.rows])
        scheduler.collected(scheduled)
        first.tokens.append(4)
        scheduler.finish(prompt)
    # Whole tiles of 16, at least 256 tokens, and all of the prompt where nothing was measured.
    assert sizes == [[1, 688], [1, 256], [1, 1000]]
    scheduler.finish(first)
    scheduler.chunk_beside_decodes = 256
    alone = Sequence(tuple(range(3000, 3900)), max_tokens=1)
    scheduler.add([alone])
    scheduled = scheduler.schedule()
    assert scheduled is not None
    assert [row.num_tokens for row in scheduled.step.rows] == [900]


def test_a_prompt_is_cut_into_chunks_and_only_the_last_asks_for_an_output() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add([make_sequence(18)])
    rows = [scheduled_now(scheduler).step.rows for _ in range(3)]
    assert [(r[0].start, r[0].num_tokens, r[0].num_outputs) for r in rows] == [
        (0, 8, 0),
        (8, 8, 0),
        (16, 2, 1),
    ]
    assert scheduler.schedule() is None, "its sample is in flight"


def test_token_ids_travel_in_row_order() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add([make_sequence(3, first=10), make_sequence(2, first=70)])
    step = scheduled_now(scheduler).step
    assert np.frombuffer(step.tokens, dtype="<u4").tolist() == [10, 11, 12, 70, 71]


def test_decodes_come_before_prefill_chunks_in_one_step() -> None:
    scheduler = Scheduler(LIMITS)
    first = make_sequence(3)
    scheduler.add([first])
    collect(scheduler, scheduled_now(scheduler))
    scheduler.add([make_sequence(30)])
    step = scheduled_now(scheduler).step
    assert [(r.start, r.num_tokens) for r in step.rows] == [(3, 1), (0, 8)]


def test_the_token_budget_bounds_a_step() -> None:
    scheduler = Scheduler(replace(LIMITS, max_step_tokens=10))
    scheduler.add([make_sequence(8), make_sequence(8), make_sequence(8)])
    assert sum(r.num_tokens for r in scheduled_now(scheduler).step.rows) == 10


def test_at_most_max_batch_sequences_run() -> None:
    scheduler = Scheduler(replace(LIMITS, max_batch=1))
    scheduler.add([make_sequence(2), make_sequence(2)])
    assert len(scheduled_now(scheduler).step.rows) == 1
    assert len(scheduler.running) == 1


def test_a_full_queue_refuses_a_request_whole() -> None:
    scheduler = Scheduler(replace(LIMITS, max_waiting=2))
    scheduler.add([make_sequence(2)])
    with pytest.raises(QueueFull, match="1 answers wait already, 2 more were asked for, and at most 2 may"):
        scheduler.add([make_sequence(2), make_sequence(2)])
    assert len(scheduler.waiting) == 1


def test_a_sequence_that_may_outgrow_the_whole_pool_is_refused() -> None:
    scheduler = Scheduler(replace(LIMITS, groups=(GroupLimits(5),)))
    scheduler.add([make_sequence(12, max_tokens=8)])
    text = "may have 21 tokens, and all 5 K/V blocks hold 20"
    with pytest.raises(RequestError, match=text):
        scheduler.add([make_sequence(2), make_sequence(12, max_tokens=9)])
    assert len(scheduler.waiting) == 1


def test_one_that_outgrew_the_pool_is_told_where_it_was_admitted_for_ever() -> None:
    scheduler = Scheduler(replace(LIMITS, groups=(GroupLimits(5),), max_step_tokens=64, prefill_chunk=64))
    sequence = make_sequence(20, max_tokens=0)
    scheduler.add([sequence])
    scheduler.collected(scheduled_now(scheduler))
    sequence.tokens.append(1)
    with pytest.raises(AssertionError, match="outgrew the whole pool"):
        scheduler.schedule()


def test_finishing_frees_the_blocks_within_the_next_step() -> None:
    scheduler = Scheduler(LIMITS)
    sequence = make_sequence(6)
    scheduler.add([sequence])
    table = scheduled_now(scheduler).step.rows[0].sequence
    scheduler.finish(sequence)
    assert scheduler.pools.num_free == LIMITS.groups[0].num_blocks
    step = scheduled_now(scheduler).step
    assert step.released == [table]
    assert step.rows == []
    assert scheduler.schedule() is None, "a release is told once"


def test_finishing_twice_does_nothing() -> None:
    scheduler = Scheduler(LIMITS)
    sequence = make_sequence(6)
    scheduler.add([sequence])
    scheduled_now(scheduler)
    scheduler.finish(sequence)
    scheduler.finish(sequence)
    scheduler.check()


def test_without_blocks_the_last_admitted_is_preempted_and_recomputed() -> None:
    scheduler = Scheduler(replace(LIMITS, groups=(GroupLimits(4),)))
    old, new = make_sequence(7, max_tokens=9), make_sequence(3, max_tokens=9)
    scheduler.add([old, new])
    collect(scheduler, scheduled_now(scheduler))
    tables = {old: old.table_id, new: new.table_id}
    while new.state is SequenceState.RUNNING:
        collect(scheduler, scheduled_now(scheduler))
    assert old.state is SequenceState.RUNNING
    assert new.num_generated > 0, "what it generated stays known"
    while new.state is not SequenceState.FINISHED:
        collect(scheduler, scheduled_now(scheduler))
    assert new.table_id != tables[new], "a table's name is never used twice"
    assert old.num_generated == new.num_generated == 9


def test_a_preempted_sequence_waits_for_its_sample_in_flight() -> None:
    scheduler = Scheduler(LIMITS)
    sequence = make_sequence(3)
    scheduler.add([sequence])
    in_flight = scheduled_now(scheduler)
    scheduler.preempt(sequence)
    release = scheduled_now(scheduler)
    assert release.step.rows == [], "it must not be admitted before its token is known"
    collect(scheduler, in_flight)
    assert scheduled_now(scheduler).step.rows[0].num_tokens == 4


def test_with_two_micro_batches_a_step_takes_half_of_the_streams() -> None:
    scheduler = Scheduler(replace(LIMITS, micro_batches=2))
    scheduler.add([make_sequence(2) for _ in range(4)])
    collect(scheduler, scheduled_now(scheduler))
    first, second = scheduled_now(scheduler), scheduled_now(scheduler)
    assert len(first.step.rows) == len(second.step.rows) == 2
    assert not set(first.sequences) & set(second.sequences)


def test_a_probe_has_no_rows() -> None:
    assert Scheduler(LIMITS).probe().step.rows == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(13, 32),
    st.randoms(use_true_random=False),
)
def test_any_mix_ends_with_every_token_computed_once_and_every_block_free(
    shapes: list[tuple[int, int]], depth: int, num_blocks: int, random: Random
) -> None:
    limits = replace(
        LIMITS, groups=(GroupLimits(num_blocks),), max_waiting=64, micro_batches=depth, prefix_cache=False
    )
    scheduler = Scheduler(limits)
    sequences = [make_sequence(prompt, max_tokens) for prompt, max_tokens in shapes]
    arriving = list(sequences)
    in_flight: list[Scheduled] = []
    holders: dict[int, int] = {}  # block -> table, as a stage would see it
    for _ in range(5000):
        if arriving and random.random() < 0.5:
            scheduler.add([arriving.pop()])
        scheduled = scheduler.schedule()
        if scheduled is not None:
            for table in scheduled.step.released:
                holders = {b: t for b, t in holders.items() if t != table}
            for grant in scheduled.step.grants:
                assert not set(grant.blocks) & set(holders), "a block is granted to two sequences"
                holders.update(dict.fromkeys(grant.blocks, grant.sequence))
            for row in scheduled.step.rows:
                owned = sum(1 for table in holders.values() if table == row.sequence)
                assert owned * limits.block_size >= row.start + row.num_tokens
            in_flight.append(scheduled)
        if in_flight and (scheduled is None or len(in_flight) >= depth):
            collect(scheduler, in_flight.pop(0))
        if not arriving and not in_flight and all(s.state is SequenceState.FINISHED for s in sequences):
            break
    assert all(s.num_generated == s.max_tokens for s in sequences)
    scheduler.check()
