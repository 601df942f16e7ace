"""Blocks shared between sequences: which may share, and the result on a stage."""

import hashlib
import hmac
import queue
import struct
from collections import deque
from dataclasses import replace
from random import Random
from typing import cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.kv.prefix import PrefixTags
from convoy.engine.outputs import FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.scheduler import GroupLimits, Scheduled, Scheduler, SchedulerLimits
from convoy.engine.sequence import Sequence, SequenceState
from convoy.errors import StepError
from convoy.model.kv.pools import BlockTables, GroupBlocks
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import PREFIX_TAG_BYTES, Step
from support.fake_executor import FakeExecutor
from support.fake_tokenizer import FakeTokenizer

SIZE = 4
LIMITS = SchedulerLimits(
    groups=(GroupLimits(32),),
    block_size=SIZE,
    max_batch=4,
    max_step_tokens=16,
    prefill_chunk=8,
    max_waiting=64,
)


class Watched:
    """Hold a scheduler and a stage's tables, and for every slot of every block the prefix written there."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.scheduler = Scheduler(limits)
        self.tables = BlockTables(
            [GroupBlocks(limits.groups[0].num_blocks)], block_size=SIZE, max_context=1024
        )
        self.written: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}
        self.num_run = 0

    def schedule(self) -> Scheduled | None:
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self.tables.commit(self.tables.stage(scheduled.step))
            for row, sequence in zip(scheduled.step.rows, scheduled.sequences, strict=True):
                self._write(sequence, row.start, row.start + row.num_tokens)
        self.scheduler.pools.check(self.scheduler.running, idle=False)
        return scheduled

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        self.num_run += end - start
        for position in range(end):
            slot = (sequence.tables[0][position // SIZE], position % SIZE)
            mine = (sequence.salt, tuple(sequence.tokens[: position + 1]))
            if position >= start:
                self.written[slot] = mine
            assert self.written[slot] == mine, "a row reads K/V of another prefix or salt"

    def collect(self, scheduled: Scheduled, token: int = 99) -> None:
        self.scheduler.collected(scheduled)
        for row, sequence in zip(scheduled.step.rows, scheduled.sequences, strict=True):
            known = row.start + row.num_tokens < len(sequence.tokens)
            if row.num_outputs and not known and sequence.state is not SequenceState.FINISHED:
                sequence.tokens.append(token)
                if sequence.num_generated >= sequence.max_tokens:
                    self.scheduler.finish(sequence)

    def run(self, sequence: Sequence) -> int:
        """Run it to its end. Return how many tokens were run for it."""
        before = self.num_run
        self.scheduler.add([sequence])
        while (scheduled := self.schedule()) is not None:
            self.collect(scheduled)
        assert sequence.state is SequenceState.FINISHED
        return self.num_run - before


def prompt(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + num_tokens))


def test_a_tag_stands_for_the_salt_and_every_token_before_it() -> None:
    tags = PrefixTags(SIZE, bytes(32))

    def at(tokens: list[int], position: int, salt: bytes = b"") -> bytes:
        return tags.at([tags.root(salt)], tokens, position)

    tokens = list(prompt(11))
    seen = {at(tokens, p) for p in range(12)}
    assert len(seen) == 12
    assert {len(tag) for tag in seen} == {PREFIX_TAG_BYTES}
    assert at(tokens, 9) == at([*tokens[:9], 55], 9)
    assert at(tokens, 9) != at([7, *tokens[1:]], 9)
    assert at(tokens, 9) != at(tokens, 9, b"another")
    other_key = PrefixTags(SIZE, b"k" * 32)
    assert other_key.root(b"") != tags.root(b"")


def test_a_second_prompt_runs_only_what_is_new_and_always_its_last_token() -> None:
    watched = Watched()
    assert watched.run(Sequence(prompt(12), 1)) == 12
    again = Sequence(prompt(12), 1)
    assert watched.run(again) == SIZE
    assert again.num_cached == 8
    longer = Sequence(prompt(30), 1)
    assert watched.run(longer) == 18
    assert longer.num_cached == 12


def test_the_next_turn_of_a_chat_finds_the_answer_of_the_last_too() -> None:
    watched = Watched()
    first = Sequence(prompt(10), 9)
    watched.run(first)
    second = Sequence((*first.tokens, *prompt(5, first=50)), 1)
    watched.run(second)
    assert second.num_cached == 16, "of 19 known tokens, the last is not run before it is asked for"


def test_another_salt_finds_nothing_and_leaves_what_is_there() -> None:
    watched = Watched()
    watched.run(Sequence(prompt(12), 1, salt=b"one"))
    other = Sequence(prompt(12), 1, salt=b"two")
    assert watched.run(other) == 12
    assert other.num_cached == 0
    assert watched.run(Sequence(prompt(12), 1, salt=b"one")) == SIZE


def test_a_prompt_that_is_scored_runs_whole() -> None:
    watched = Watched()
    watched.run(Sequence(prompt(12), 1))
    assert watched.run(Sequence(prompt(12), 1, all_outputs=True)) == 12


def test_a_running_sequence_shares_what_it_has_filled() -> None:
    watched = Watched(replace(LIMITS, micro_batches=2))
    first = Sequence(prompt(8), 20)
    watched.scheduler.add([first])
    assert watched.schedule() is not None
    second = Sequence(prompt(10), 20)
    watched.scheduler.add([second])
    watched.schedule()
    assert second.tables[0][:2] == first.tables[0][:2]
    watched.scheduler.finish(first)
    watched.schedule()
    assert second.tables, "they stay while one of the two runs"
    watched.scheduler.check()


def test_what_was_used_longest_ago_goes_first_and_a_chain_from_its_end() -> None:
    watched = Watched(replace(LIMITS, groups=(GroupLimits(9),)))
    watched.run(Sequence(prompt(16), 1))
    watched.run(Sequence(prompt(16, first=50), 1))
    watched.run(Sequence(prompt(8, first=90), 1))  # takes the last free block and one that is kept
    newer, older = Sequence(prompt(16, first=50), 1), Sequence(prompt(16), 1)
    watched.run(older)
    assert older.num_cached == 12
    watched.run(newer)
    assert newer.num_cached == 12


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    watched = Watched()
    sequence = Sequence(prompt(8), 20)
    watched.scheduler.add([sequence])
    scheduled = watched.schedule()
    assert scheduled is not None
    watched.collect(scheduled)
    watched.scheduler.preempt(sequence)
    scheduled = watched.schedule()
    assert scheduled is not None
    assert [(r.start, r.num_tokens) for r in scheduled.step.rows] == [(8, 1)]
    assert sequence.num_cached == 0, "what it ran itself was not found"


def _two_steps() -> tuple[BlockTables, Step, Step]:
    """Return tables after the first of two steps: a sequence, then one that shares its prefix."""
    watched = Watched()
    watched.run(Sequence(prompt(10), 1))
    watched.scheduler.add([Sequence(prompt(12), 1)])
    scheduled = watched.scheduler.schedule()
    assert scheduled is not None
    assert scheduled.step.grants[0].shared
    return watched.tables, scheduled.step, watched.scheduler.probe().step


@pytest.mark.parametrize("bit", [0, 127])
def test_a_stage_refuses_a_shared_block_of_another_prefix(bit: int) -> None:
    tables, step, _ = _two_steps()
    shared = bytearray(step.grants[0].shared)
    shared[bit // 8] ^= 1 << bit % 8
    wrong = msgspec.structs.replace(step.grants[0], shared=bytes(shared))
    with pytest.raises(StepError, match="which holds another prefix"):
        tables.stage(msgspec.structs.replace(step, grants=[wrong, *step.grants[1:]]))
    tables.stage(step)


def test_a_stage_refuses_a_row_behind_another_prefix_than_it_holds() -> None:
    tables, step, _ = _two_steps()
    for tag, text in ((bytes(16), "after another prefix"), (b"", "does not name the prefix")):
        row = msgspec.structs.replace(step.rows[0], tag=tag)
        with pytest.raises(StepError, match=text):
            tables.stage(msgspec.structs.replace(step, rows=[row]))
    bare = msgspec.structs.replace(step.rows[0], tag=b"", tags=b"")
    with pytest.raises(StepError, match="does not name the prefix"):
        tables.stage(msgspec.structs.replace(step, rows=[bare]))


def test_a_stage_refuses_tags_that_are_too_few_and_a_prefix_behind_other_blocks() -> None:
    tables, step, _ = _two_steps()
    row = msgspec.structs.replace(step.rows[0], tags=step.rows[0].tags[16:])
    with pytest.raises(StepError, match="has tags of 16 and"):
        tables.stage(msgspec.structs.replace(step, rows=[row]))
    with pytest.raises(StepError, match="only a new one may share"):
        tables.stage(msgspec.structs.replace(step, grants=[*step.grants[1:], step.grants[0]]))
    odd = msgspec.structs.replace(step.grants[0], shared=b"odd")
    with pytest.raises(StepError, match="3 bytes of tags"):
        tables.stage(msgspec.structs.replace(step, grants=[odd]))


def test_a_stage_refuses_a_row_that_writes_to_a_shared_block() -> None:
    watched = Watched(replace(LIMITS, micro_batches=2))
    first, second = Sequence(prompt(8), 20), Sequence(prompt(10), 20)
    watched.scheduler.add([first])
    start = watched.schedule()
    watched.scheduler.add([second])
    watched.schedule()
    assert start is not None
    again = msgspec.structs.replace(start.step, grants=[])
    with pytest.raises(StepError, match="which another shares"):
        watched.tables.stage(again)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 20), st.integers(1, 10), st.sampled_from([b"a", b"b"])),
        min_size=1,
        max_size=14,
    ),
    st.integers(1, 3),
    st.integers(15, 32),  # the longest have 60 tokens
    st.randoms(use_true_random=False),
)
def test_no_order_of_events_leaks_a_block_or_shows_one_to_another_prefix_or_salt(
    shapes: list[tuple[int, int, int, bytes]], depth: int, num_blocks: int, random: Random
) -> None:
    watched = Watched(replace(LIMITS, groups=(GroupLimits(num_blocks),), micro_batches=depth))
    scheduler = watched.scheduler
    arriving = [
        Sequence((*prompt(common), *prompt(own, first=40 + own % 3)), max_tokens, salt=salt)
        for common, own, max_tokens, salt in shapes
    ]
    in_flight: deque[Scheduled] = deque()
    for turn in range(5000):
        if arriving and random.random() < 0.5:
            scheduler.add([arriving.pop()])
        if scheduler.running and random.random() < 0.1:
            scheduler.finish(random.choice(scheduler.running))
        # not for ever: a sequence preempted at every turn could never finish
        if turn < 500 and scheduler.running and random.random() < 0.1:
            scheduler.preempt(random.choice(scheduler.running))
        scheduled = watched.schedule()
        if scheduled is not None:
            in_flight.append(scheduled)
        if in_flight and (scheduled is None or len(in_flight) >= depth):
            watched.collect(in_flight.popleft(), token=random.choice([98, 99]))
        if not (arriving or in_flight or scheduler.running or scheduler.waiting):
            break
    assert [*arriving, *scheduler.running, *scheduler.waiting] == []
    scheduler.check()
    scheduler.pools.check([], idle=False)
    while (last := watched.schedule()) is not None:
        assert not last.step.rows
    assert len(watched.tables) == 0


@pytest.mark.parametrize("share_across_keys", [False, True])
def test_two_keys_share_only_where_the_engine_is_told_to(share_across_keys: bool) -> None:
    options = EngineOptions(max_context=128, probe_s=3600.0, share_across_keys=share_across_keys)
    executor = FakeExecutor(block_size=SIZE)
    engine = Engine(executor, cast(Tokenizer, FakeTokenizer()), LIMITS, options)
    greedy = SamplingParams(temperature=0.0)

    def ask(salt: bytes) -> tuple[list[int], int]:
        tokens: list[int] = []
        found: queue.SimpleQueue[FinishOutput] = queue.SimpleQueue()

        def on_output(output: Output) -> None:
            if isinstance(output, TokenOutput):
                tokens.append(output.token_id)
            elif isinstance(output, FinishOutput):
                found.put(output)

        engine.submit(GenerationRequest(prompt(13), greedy, 6, ignore_eos=True, cache_salt=salt), on_output)
        return tokens, found.get(timeout=60).cached_tokens

    engine.start()
    (first, cold), (same, warm), (other, foreign) = ask(b"one"), ask(b"one"), ask(b"two")
    assert (cold, warm, foreign) == (0, 12, 12 if share_across_keys else 0)
    assert first == same == other
    assert engine.stats().cached_tokens == warm + foreign
    engine.close()
    assert all(
        np.frombuffer(s.tokens, "<u4").size == sum(r.num_tokens for r in s.rows) for s in executor.steps
    )


def test_tags_are_hmacs_of_the_chain() -> None:
    key = bytes(range(32))
    tags = PrefixTags(SIZE, key)
    root = hmac.digest(key, b"convoy prefix" + hashlib.sha256(b"salt").digest(), "sha256")[:16]
    assert tags.root(b"salt") == root
    chain, tokens = [root], [5, 6, 7, 8, 9, 10]
    first = hmac.digest(key, root + struct.pack("<4I", 5, 6, 7, 8), "sha256")[:16]
    assert tags.at(chain, tokens, 6) == hmac.digest(key, first + struct.pack("<2I", 9, 10), "sha256")[:16]
    assert chain == [root, first]
