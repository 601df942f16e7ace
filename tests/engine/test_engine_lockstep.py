"""Whatever comes, goes, is guessed or lost: stages take every step, and outputs are the serial run's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.engine.scheduler import GroupLimits, Scheduled, Scheduler, SchedulerLimits
from convoy.engine.sequence import Sequence, SequenceState
from convoy.model.kv.pools import BlockTables, GroupBlocks
from convoy.model.sampling.output_rows import GREEDY
from convoy.plan.cost import TokenCost
from convoy.wire.messages.control import Step
from support.examples import examples
from support.fake_executor import VOCAB, FakeExecutor, next_token

BLOCK = 4
CONTEXT = 96
LIMITS = SchedulerLimits(
    groups=(GroupLimits(64),),
    block_size=BLOCK,
    max_batch=6,
    max_step_tokens=40,
    prefill_chunk=24,
    max_waiting=64,
)
STEEP = TokenCost(((0.05, None),))  # chunks of 24 tokens shrink to 16 early


def serial(sequence: Sequence) -> list[int]:
    """Return the tokens that one request alone would get, one by one."""
    tokens = list(sequence.prompt_ids)
    for _ in range(sequence.max_tokens):
        tokens.append(next_token(tokens))
    return tokens


class Guesser:
    """Guess right now and then."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        tokens = list(sequence.tokens)
        drafts: list[int] = []
        for _ in range(self._random.randrange(5)):
            right = self._random.random() < 0.7
            drafts.append(next_token([*tokens, *drafts]) if right else self._random.randrange(VOCAB))
        return drafts

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts

    def forget(self, sequence: Sequence) -> None:
        pass


def tables_of(limits: SchedulerLimits) -> BlockTables:
    groups = [GroupBlocks(group.num_blocks) for group in limits.groups]
    return BlockTables(groups, block_size=BLOCK, max_context=2 * CONTEXT)


@dataclass
class World:
    """Hold a scheduler, a first stage that takes a step when it is sent, and a last one that lags behind."""

    limits: SchedulerLimits
    random: Random
    feeds: bool = False

    def __post_init__(self) -> None:
        # sequences that guess are not fed
        drafter = None if self.feeds else Guesser(self.random)
        self.scheduler = Scheduler(self.limits, drafter=drafter)
        self.scheduler.feeds = self.feeds
        self.in_flight: deque[Scheduled] = deque()
        self._begin()

    def _begin(self) -> None:
        self.executor = FakeExecutor(depth=8, block_size=BLOCK, feeds=self.feeds)
        self.executor.misfeeds = lambda: self.random.random() < 0.2
        self.first, self.last = tables_of(self.limits), tables_of(self.limits)

    def lose_every_stage(self) -> None:
        self.limits = replace(self.limits, groups=(GroupLimits(self.random.choice([20, 30, 64])),))
        self.in_flight.clear()
        self.scheduler.reset(self.limits)
        self._begin()

    def send(self) -> bool:
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return False
        take(self.first, scheduled.step)
        num_outputs = sum(row.num_outputs for row in scheduled.step.rows)
        self.executor.submit(scheduled.step, [GREEDY] * num_outputs)
        self.in_flight.append(scheduled)
        return True

    def receive(self) -> None:
        scheduled = self.in_flight.popleft()
        take(self.last, scheduled.step)
        self.scheduler.collected(scheduled)
        outcomes = deque(self.executor.collect().outcomes)
        parts = zip(scheduled.step.rows, scheduled.sequences, scheduled.drafts, strict=True)
        for row, sequence, drafts in parts:
            of_row = [outcomes.popleft() for _ in range(row.num_outputs)]
            number = scheduled.step.number
            if sequence.state is SequenceState.FINISHED or sequence.void_step == number:
                continue
            sampled = [outcome.sampled.token_id for outcome in of_row]
            self._advance(sequence, row.start + row.num_tokens - len(drafts), list(drafts), sampled)
            if sequence.fed_step > number and not of_row[-1].feeds:
                self.scheduler.refuse_fed(sequence)

    def _advance(self, sequence: Sequence, known: int, drafts: list[int], sampled: list[int]) -> None:
        if known < len(sequence.tokens) or not sampled:
            return
        num_accepted = 0
        for token, draft in zip(sampled[-len(drafts) - 1 :], [*drafts, None], strict=True):
            sequence.tokens.append(token)
            if sequence.num_generated == sequence.max_tokens or token != draft:
                break
            num_accepted += 1
        if drafts:
            self.scheduler.keep(sequence, len(drafts), num_accepted)
        if sequence.num_generated == sequence.max_tokens:
            self.scheduler.finish(sequence)


def take(tables: BlockTables, step: Step) -> None:
    tables.commit(tables.stage(step))


shapes = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 28), st.booleans(), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


@settings(derandomize=True, max_examples=examples(250), deadline=None)
@given(
    shapes,
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from([20, 30, 64]),
    st.sampled_from([None, STEEP]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_stages_take_every_step_and_outputs_are_those_of_the_serial_run(
    asked: list[tuple[int, int, bool, int]],
    micro_batches: int,
    window: int,
    num_blocks: int,
    cost: TokenCost | None,
    feeds: bool,
    seed: int,
) -> None:
    random = Random(seed)  # evenly spread, so that every event happens
    limits = replace(
        LIMITS,
        micro_batches=micro_batches,
        prefill_window=window,
        groups=(GroupLimits(num_blocks),),
        cost=cost,
    )
    world = World(limits, random, feeds=feeds)
    depth = max(limits.micro_batches, limits.max_chunks) * (1 + feeds)
    sequences = [
        # few beginnings, so that many share blocks
        Sequence(
            tuple((i * (1 + kind)) % 9 for i in range(size)),
            max_tokens,
            all_outputs=scored,
            feeds=feeds and not scored,
        )
        for size, max_tokens, scored, kind in asked
    ]
    arriving = list(sequences)
    aborted: list[Sequence] = []
    for turn in range(1500):
        chance = random.random()
        if arriving and chance < 0.3:
            world.scheduler.add([arriving.pop()])
        live = [s for s in sequences if s not in arriving and s.state is not SequenceState.FINISHED]
        calm = turn > 150  # then the remaining sequences must end by themselves
        if live and chance > 0.97 and not calm:
            aborted.append(random.choice(live))
            world.scheduler.finish(aborted[-1])
            world.scheduler.finish(random.choice(aborted))
        elif chance > 0.95 and not calm:
            world.lose_every_stage()
        sent = world.send()
        if world.in_flight and (not sent or len(world.in_flight) >= depth):
            world.receive()
        if not world.in_flight and not world.scheduler.running:
            world.scheduler.check()
        if not sent and not arriving and not live and not world.in_flight:
            break
    else:
        raise AssertionError("it came to no end")
    world.scheduler.check()
    assert len(world.first) == len(world.last) == 0, "a table outlived its sequence"
    assert not world.first.num_held
    assert not world.last.num_held
    for sequence in sequences:
        whole = serial(sequence)
        assert sequence.tokens == whole[: len(sequence.tokens)]
        assert sequence in aborted or sequence.tokens == whole
