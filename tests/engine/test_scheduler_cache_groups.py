"""Several cache groups: tables, rings and states of every sequence, under arrivals, ends and preemption."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.config.table import MAX_DRAFT
from convoy.engine.requests.admission import check_request
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.scheduler import GroupLimits, Scheduled, Scheduler, SchedulerLimits
from convoy.engine.sequence import Sequence, SequenceState
from convoy.errors import RequestError
from convoy.model.kv.pools import BlockTables, GroupBlocks
from convoy.model.sampling.params import SamplingParams
from convoy.plan.spec.cache import CacheGroup
from convoy.wire.messages.control import Row
from engine.test_engine_lockstep import Guesser, serial
from support.examples import examples
from support.fake_executor import next_token

BLOCK, CHUNK = 4, 10
FULL = CacheGroup("full", None, (0,), 2, 1, 8, 8)
NEAR = CacheGroup("window-7", 7, (1, 2), 2, 1, 8, 8)
FAR = CacheGroup("window-18", 18, (3,), 2, 1, 8, 8)
ENTRIES = CacheGroup("entries-3", None, (5,), 2, 1, 8, 8, kind="entries", row_elements=9, stride=3)
PENDING = CacheGroup("pending-6", 6, (5,), 2, 1, 8, 8, kind="pending", row_elements=18)
STATE = CacheGroup("state", None, (4,), 0, 0, 0, 0, kind="recurrent", state_elements=9)
LIMITS = SchedulerLimits(
    groups=(), block_size=BLOCK, max_batch=5, max_step_tokens=24, prefill_chunk=CHUNK, max_waiting=64
)
Slot = tuple[int, int, int]  # group, block, offset


def limits_of(groups: list[CacheGroup], counts: list[int], **changes: int) -> SchedulerLimits:
    row = max(CHUNK, changes.get("max_drafts", MAX_DRAFT) + 1)
    made = tuple(
        GroupLimits(count, group.ring_blocks(BLOCK, row), group.stride, group.window)
        for group, count in zip(groups, counts, strict=True)
    )
    return replace(LIMITS, groups=made, **changes)  # type: ignore[arg-type]


class Stages:
    """Hold a stage's tables, and in every slot of every block the tokens up to the last one written there."""

    def __init__(self, groups: list[CacheGroup], limits: SchedulerLimits) -> None:
        self._groups = groups
        self.tables = BlockTables(
            [
                GroupBlocks(group.num_blocks, of.window, of.kind == "recurrent", of.stride)
                for group, of in zip(limits.groups, groups, strict=True)
            ],
            block_size=BLOCK,
            max_context=256,
        )
        self._held: dict[Slot, tuple[int, ...]] = {}

    def take(self, scheduled: Scheduled) -> list[int]:
        """Check that each row finds what it looks back on. Returns the tokens that are sampled."""
        staged = self.tables.stage(scheduled.step)
        self.tables.commit(staged)
        for group, source, target in staged.copies:
            self._held[group, target, 0] = self._held[group, source, 0]
        sampled = []
        parts = zip(staged.rows, scheduled.sequences, scheduled.drafts, strict=True)
        for (row, table), sequence, drafts in parts:
            tokens = [*sequence.tokens, *drafts][: row.start + row.num_tokens]
            for group, blocks in enumerate(table.blocks):
                self._run(group, blocks, row, tokens)
            ends = range(len(tokens) - row.num_outputs, len(tokens))
            sampled += [next_token(tokens[: end + 1]) for end in ends]
        return sampled

    def _run(self, group: int, blocks: list[int], row: Row, tokens: list[int]) -> None:
        window = self._groups[group].window
        if self._groups[group].kind == "recurrent":
            state = (group, blocks[0], 0)
            assert not row.start or self._held[state] == tuple(tokens[: row.start]), "another's state"
            self._held[state] = tuple(tokens)
            return

        def slot(position: int) -> Slot:
            place = position // stride
            return group, blocks[place // BLOCK % len(blocks)], place % BLOCK

        stride = self._groups[group].stride
        last = [position for position in range(len(tokens)) if position % stride == stride - 1]
        for position in last:
            if position >= row.start:
                self._held[slot(position)] = tuple(tokens[: position + 1])
        first = 0 if window is None else max(0, row.start - window + 1)
        for position in (position for position in last if position >= first):
            assert self._held[slot(position)] == tuple(tokens[: position + 1]), "K/V of another prefix"


class World:
    """Hold a scheduler, and stages that lag behind."""

    def __init__(self, groups: list[CacheGroup], limits: SchedulerLimits, random: Random) -> None:
        guesser = None if STATE in groups else Guesser(random)
        self.scheduler = Scheduler(limits, drafter=guesser)
        self.stages = Stages(groups, limits)
        self._groups, self._limits = groups, limits
        self.in_flight: deque[tuple[Scheduled, list[int]]] = deque()

    def lose_every_stage(self) -> None:
        """Replace every stage: new ones have no K/V, and no block that an earlier prefix lay in."""
        self.in_flight.clear()
        self.scheduler.reset(self._limits)
        self.stages = Stages(self._groups, self._limits)

    def send(self) -> bool:
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self.in_flight.append((scheduled, self.stages.take(scheduled)))
        return scheduled is not None

    def receive(self) -> None:
        scheduled, tokens = self.in_flight.popleft()
        self.scheduler.collected(scheduled)
        for row, sequence, drafts in zip(
            scheduled.step.rows, scheduled.sequences, scheduled.drafts, strict=True
        ):
            sampled, tokens = tokens[: row.num_outputs], tokens[row.num_outputs :]
            known = row.start + row.num_tokens - len(drafts)
            if sequence.state is not SequenceState.FINISHED and sampled and known == len(sequence.tokens):
                self._advance(sequence, list(drafts), sampled)

    def _advance(self, sequence: Sequence, drafts: list[int], sampled: list[int]) -> None:
        num_accepted = 0
        for token, draft in zip(sampled, [*drafts, None], strict=True):
            sequence.tokens.append(token)
            if sequence.num_generated == sequence.max_tokens or token != draft:
                break
            num_accepted += 1
        if drafts:
            self.scheduler.keep(sequence, len(drafts), num_accepted)
        if sequence.num_generated == sequence.max_tokens:
            self.scheduler.finish(sequence)

    def run(self, *sequences: Sequence) -> None:
        self.scheduler.add(list(sequences))
        while self.send() or self.in_flight:
            if self.in_flight:
                self.receive()
        self.scheduler.check()


MODELS = {
    "windows and full attention": ([FULL, NEAR, FAR], [30, 40, 44]),
    "little room for rings": ([FULL, NEAR, FAR], [40, 21, 30]),
    "one window": ([NEAR], [25]),
    "two windows": ([NEAR, FAR], [24, 26]),
    "entries of several tokens": ([NEAR, ENTRIES, PENDING], [25, 14, 20]),
    "a state beside full attention": ([FULL, STATE], [30, 3]),
    "all of them": ([NEAR, FULL, STATE], [14, 34, 4]),
}


@settings(derandomize=True, max_examples=examples(120), deadline=None)
@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 14)), min_size=1, max_size=10),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)
def test_every_row_finds_its_own_past_and_outputs_are_those_of_the_serial_run(
    model: str, shapes: list[tuple[int, int]], depth: int, window: int, seed: int
) -> None:
    random = Random(seed)
    groups, counts = MODELS[model]
    limits = limits_of(groups, counts, micro_batches=depth, prefill_window=window, max_drafts=6)
    world = World(groups, limits, random)
    most = min(world.scheduler.pools.max_tokens, 200)
    known = [tuple(random.randrange(9) for _ in range(70)) for _ in range(2)]
    sequences = [
        Sequence(_begun(random, random.choice(known), prompt), min(count, most - prompt))
        for prompt, count in shapes
    ]
    arriving, aborted = list(sequences), set()
    for turn in range(3000):
        if arriving and random.random() < 0.4:
            world.scheduler.add([arriving.pop()])
        live = [s for s in sequences if s not in arriving and s.state is not SequenceState.FINISHED]
        if live and turn < 100 and random.random() < 0.03:
            aborted.add(random.choice(live))
            world.scheduler.finish(next(iter(aborted)))
        if turn < 100 and random.random() < 0.01:
            world.lose_every_stage()
        sent = world.send()
        if world.in_flight and (not sent or len(world.in_flight) >= max(depth, limits.max_chunks)):
            world.receive()
        world.scheduler.check()
        if not sent and not arriving and not live and not world.in_flight:
            break
    else:
        raise AssertionError("it came to no end")
    assert len(world.stages.tables) == 0
    for sequence in sequences:
        whole = serial(sequence)
        assert sequence.tokens == whole[: len(sequence.tokens)]
        assert sequence in aborted or sequence.tokens == whole


def _begun(random: Random, known: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Make a prompt that begins as ``known`` does, often wholly, and goes on by chance."""
    common = num_tokens if random.random() < 0.3 else random.randrange(num_tokens + 1)
    return (*known[:common], *(random.randrange(9) for _ in range(num_tokens - common)))


def test_a_long_sequence_holds_no_more_of_a_window_than_its_ring() -> None:
    groups = [FULL, NEAR]
    limits = limits_of(groups, [60, 64], max_drafts=0)
    world = World(groups, limits, Random(1))
    sequence = Sequence(tuple(range(9)) * 20, 8)
    world.scheduler.add([sequence])
    longest = [0, 0]
    while world.send() or world.in_flight:
        if sequence.tables:
            longest = [len(table) for table in sequence.tables]
        if world.in_flight:
            world.receive()
    assert longest == [47, 5]  # 187 positions in blocks of 4; 6 back and a chunk of 10, wherever it begins


def test_who_finds_no_ring_waits_until_one_is_free() -> None:
    groups = [FULL, NEAR]
    limits = limits_of(groups, [60, 5], max_drafts=0)
    world = World(groups, limits, Random(1))
    first, second = Sequence(tuple(range(30)), 4), Sequence(tuple(range(40)), 4)
    world.scheduler.add([first, second])
    world.send()
    assert world.scheduler.running == [first]
    while world.send() or world.in_flight:
        world.receive()
    assert [s.tokens for s in (first, second)] == [serial(s) for s in (first, second)]
    assert world.scheduler.num_preempted == 0


def test_a_sequence_that_outgrows_the_rings_is_preempted_and_run_again() -> None:
    groups = [FULL, NEAR]
    limits = limits_of(groups, [60, 7], max_drafts=0)
    world = World(groups, limits, Random(1))
    sequences = [Sequence(tuple(range(first, first + 7)), 30) for first in (0, 3)]
    world.run(*sequences)
    assert world.scheduler.num_preempted > 0
    assert [s.tokens for s in sequences] == [serial(s) for s in sequences]


# The last 8 tokens of a prompt are rendered anew in the next turn, and a place for every 3 tokens makes a
# prefix end at multiples of 12.
RETAINED = {name: 36 if ENTRIES in groups else 44 for name, (groups, _) in MODELS.items()}


@pytest.mark.parametrize("model", MODELS)
def test_the_next_turn_finds_the_prompt_of_the_last_one(model: str) -> None:
    groups, counts = MODELS[model]
    world = World(groups, limits_of(groups, counts, max_drafts=0), Random(1))
    first = Sequence(tuple(token % 9 for token in range(53)), 3)
    world.run(first)
    turn = Sequence((*first.prompt_ids[:45], 1, 1, *range(9)), 2)
    world.run(turn)
    assert turn.num_cached == RETAINED[model]
    assert turn.tokens == serial(turn)


@pytest.mark.parametrize("model", MODELS)
def test_the_next_turn_finds_the_answer_of_the_last_one(model: str) -> None:
    groups, counts = MODELS[model]
    world = World(groups, limits_of(groups, counts, max_drafts=0), Random(1))
    first = Sequence(tuple(token % 9 for token in range(30)), 32)
    world.run(first)
    turn = Sequence((*first.tokens, 1, 2, 3, 4, 5), 2)
    world.run(turn)
    assert turn.num_cached == 60, "the last answered token never ran"
    assert turn.tokens == serial(turn)


def test_a_mark_stays_where_another_sequence_passed_first() -> None:
    world = World([FULL, STATE], limits_of([FULL, STATE], [40, 8], max_drafts=0), Random(1))
    prompt = tuple(token % 9 for token in range(60))
    # Both reach 20 in one step. The longer one labels its state there, and drops it at 40.
    world.run(Sequence(prompt, 2), Sequence(prompt[:30], 2))
    turn = Sequence((*prompt[:22], *range(9)), 2)
    world.run(turn)
    assert turn.num_cached == 20
    assert turn.tokens == serial(turn)


@pytest.mark.parametrize(
    ("groups", "counts", "room"),
    [
        ([FULL, NEAR], [20, 64], 80),
        ([NEAR], [5], None),  # a whole ring: as long as you like
        ([NEAR], [4], 16),
        ([FULL, NEAR], [20, 3], 12),
        ([FULL, STATE], [20, 1], 80),
        ([NEAR, ENTRIES], [5, 7], 84),
    ],
)
def test_the_longest_sequence_is_bounded_by_full_tables_and_by_rings_that_are_cut_short(
    groups: list[CacheGroup], counts: list[int], room: int | None
) -> None:
    pools = Scheduler(limits_of(groups, counts, max_drafts=0)).pools
    asked = GenerationRequest((1, 2), SamplingParams(temperature=0.0), max_tokens=(room or 5000) - 2)
    check_request(asked, vocab_size=9, eos_ids=frozenset(), max_context=10_000, pools=pools)
    if room is None:
        return
    with pytest.raises(RequestError, match=f"K/V blocks of 4 tokens, but the whole pool has {sum(counts)}"):
        check_request(
            replace(asked, max_tokens=room - 1),
            vocab_size=9,
            eos_ids=frozenset(),
            max_context=10_000,
            pools=pools,
        )
