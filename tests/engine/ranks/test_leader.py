"""Rank 0 and the rank that follows it, in one process: an order is run to its end, or it is said why not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from convoy.engine.ranks.watch import RankWatch
from convoy.errors import CollectiveError, ConvoyError, HiddenError, StageLost, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.output_rows import GREEDY
from convoy.model.stage import StageOptions
from convoy.model.tensors import to_wire
from convoy.plan.spec.sharding import Shard
from convoy.transport.link.link import Link, ReceivedTensor
from convoy.wire.messages.control import BlockGrant, FrameType, ReadBlocks, Row, StageAssignment, Step
from convoy.wire.messages.ranks import RankOutput, RankStep
from support.rank_pair import PLAN_ID, WAIT_S, RankPair, rank_pair
from support.waiting import wait_until

SOURCE = ModelSource.resolve("demo-mini")
NUM_LAYERS, HIDDEN_SIZE = SOURCE.spec.num_layers, SOURCE.spec.hidden_size
NUM_KV_HEADS = SOURCE.spec.cache_groups[0].num_kv_heads
OPTIONS = StageOptions(num_threads=1, require_tags=False)
WHOLE = StageAssignment("alpha", 0, NUM_LAYERS, embed=True, output=True)
MIDDLE = StageAssignment("alpha", 1, 3, embed=False, output=False)
TOKENS = tuple(range(5, 45))
TOLERANCE = 1e-4
TAGS = [bytes([number]) * 16 for number in range(2)]


def load(assignment: StageAssignment) -> list[HostStage]:
    return [HostStage.load(SOURCE, assignment, OPTIONS, shard=Shard(rank, 2)) for rank in (0, 1)]


@pytest.fixture(scope="module")
def stages() -> list[HostStage]:
    return load(WHOLE)


@pytest.fixture(scope="module")
def middle() -> list[HostStage]:
    return load(MIDDLE)


@pytest.fixture(scope="module")
def alone() -> HostStage:
    return HostStage.load(SOURCE, WHOLE, OPTIONS)


def step(number: int = 1, start: int = 0, end: int = len(TOKENS)) -> Step:
    """Make a step of one sequence's tokens, with an output behind the last; all blocks with the first."""
    grants = [] if start else [BlockGrant.append(0, 0, list(range(-(-len(TOKENS) // 16))))]
    encoded = torch.tensor(TOKENS[start:end], dtype=torch.int32).numpy().tobytes()
    return Step(number, [], grants, [Row(0, start, end - start, 1)], encoded)


# Orders.


def test_prompts_and_decodes_over_two_ranks_are_those_of_one_stage(
    stages: list[HostStage], alone: HostStage
) -> None:
    alone.make_pools(32)
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        pair.follow()
        for number, (start, end) in enumerate([(0, 30), (30, 31), (31, 40)]):
            asked, tokens = step(number, start, end), torch.tensor(TOKENS[start:end])
            hidden = pair.leader.run(asked, None, tokens)
            found = pair.leader.output(pair.leader.select(asked, hidden))
            expected = alone.output(alone.select(asked, alone.run(asked, None, tokens)))
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
            wait_until(lambda number=number: pair.follower.finished_step == number)  # type: ignore[misc]


def test_a_stage_in_the_middle_hands_its_hidden_state_to_the_rank_that_follows(
    middle: list[HostStage], stages: list[HostStage]
) -> None:
    hidden = torch.randn(len(TOKENS), HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    whole = HostStage.load(SOURCE, MIDDLE, OPTIONS)
    whole.make_pools(32)
    with rank_pair(middle, num_kv_heads=NUM_KV_HEADS) as pair:
        pair.follow()
        found = pair.leader.run(step(), hidden, None)
        torch.testing.assert_close(found, whole.run(step(), hidden, None), atol=TOLERANCE, rtol=0)


def test_a_step_without_rows_proves_that_the_other_rank_computes(stages: list[HostStage]) -> None:
    empty = Step(4, [], [], [], b"")
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS, deadline_s=1.5) as pair:
        thread = pair.follow()
        pair.leader.run(empty, None, torch.empty(0, dtype=torch.int64))
        pair.orders.put(None)
        thread.join(WAIT_S)
        with pytest.raises(CollectiveError, match=r"rank 1 sent nothing"):
            pair.leader.run(Step(5, [], [], [], b""), None, torch.empty(0, dtype=torch.int64))


def test_an_order_that_was_taken_runs_to_its_end_though_the_rank_is_being_stopped(
    stages: list[HostStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        real, reached, released = pair.collectives[1].all_reduce, threading.Event(), threading.Event()

        def held(x: torch.Tensor) -> torch.Tensor:
            reached.set()
            assert released.wait(WAIT_S)
            return real(x)

        monkeypatch.setattr(pair.collectives[1], "all_reduce", held)
        thread = pair.follow()
        leading = threading.Thread(target=pair.executor.submit, args=(step(), [GREEDY]), daemon=True)
        leading.start()
        assert reached.wait(WAIT_S)
        pair.orders.put(None)  # nothing is taken behind what runs now
        released.set()
        leading.join(WAIT_S)
        thread.join(WAIT_S)
        assert not leading.is_alive()
        assert not thread.is_alive()
        assert len(pair.executor.collect().outcomes) == 1
        assert pair.follower.finished_step == 1
        assert not pair.failed


# What goes wrong.


def test_a_follower_that_cannot_run_an_order_says_why_and_who_waits_for_it_wakes(
    stages: list[HostStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> torch.Tensor:
        raise StepError("no block of that number")

    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        monkeypatch.setattr(stages[1], "run", run)
        pair.follow()
        began_s = time.monotonic()
        with pytest.raises(StageLost, match="beta could not run a step: no block of that number"):
            pair.executor.submit(step(), [GREEDY])
        assert time.monotonic() - began_s < WAIT_S / 2
        assert pair.executor.suspects == ("beta",)
        with pytest.raises(StageLost, match="no block of that number"):
            pair.executor.submit(step(2), [GREEDY])
        with pytest.raises(StageLost, match="no block of that number"):
            pair.executor.read_blocks(0, NUM_LAYERS, [0])


def test_a_link_that_ends_wakes_rank_0_and_names_the_member(stages: list[HostStage]) -> None:
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        threading.Timer(0.1, pair.links[1].close).start()  # no follower
        with pytest.raises(StageLost, match=r"the link to .* ended"):
            pair.executor.submit(step(), [GREEDY])
        with pytest.raises(StageLost, match="the link to beta ended"):
            pair.executor.submit(step(2), [GREEDY])


def test_a_deadline_that_passes_ends_the_group_and_names_the_rank(stages: list[HostStage]) -> None:
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS, deadline_s=0.3) as pair:  # and no follower
        with pytest.raises(CollectiveError, match=r"rank 1 sent nothing of operation 0.* within 0\.3 s"):
            pair.executor.submit(step(), [GREEDY])
        assert pair.leader.culprit == "beta"
        assert pair.executor.suspects == ("beta",)
        with pytest.raises(CollectiveError, match="rank 1 sent nothing"):
            pair.executor.submit(step(2), [GREEDY])


def test_what_rank_0_cannot_run_ends_the_group_for_the_other_rank_too(
    stages: list[HostStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> torch.Tensor:
        raise StepError("not with these rows")

    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        monkeypatch.setattr(stages[0], "run", run)
        pair.follow()
        with pytest.raises(StageLost, match="not with these rows"):
            pair.executor.submit(step(), [GREEDY])
        with pytest.raises(CollectiveError, match="not with these rows"):
            pair.collectives[0].all_reduce(torch.ones(1))


def test_a_rank_that_answers_no_ping_while_it_is_waited_for_is_given_up() -> None:
    class Silent:
        peer = "beta"

        def is_there(self, _timeout_s: float) -> bool:
            return False

    told: list[ConvoyError] = []
    heard = threading.Event()

    def abort(error: ConvoyError) -> None:
        told.append(error)
        heard.set()

    watch = RankWatch({1: Silent()}, abort)  # type: ignore[dict-item]
    watch.begin()
    assert heard.wait(WAIT_S)
    watch.close()
    assert isinstance(told[0], CollectiveError)
    assert told[0].rank == 1
    assert "beta, rank 1 of this stage, answers no ping" in told[0].message


# Orders that make no sense.


@dataclass
class Odd:
    """Describe an order or a hidden state, and the error that it causes."""

    act: Callable[[RankPair, Link], None]
    error: type[ConvoyError]
    said: str


def order(message: RankStep | RankOutput) -> Callable[[RankPair, Link], None]:
    return lambda pair, link: pair.follower.accept(link, message, PLAN_ID)


def hidden_of(number: int, boundary: int = 1, rows: int = 2) -> ReceivedTensor:
    return ReceivedTensor(PLAN_ID, number, boundary, to_wire(torch.zeros(rows, HIDDEN_SIZE)))


def announced(number: int, received: ReceivedTensor) -> Callable[[RankPair, Link], None]:
    def act(pair: RankPair, link: Link) -> None:
        pair.follower.accept(link, RankOutput(number, 2, hidden=True), PLAN_ID)
        pair.follower.accept_tensor(received)

    return act


def twice(pair: RankPair, link: Link) -> None:
    for _ in range(2):
        pair.follower.accept(link, RankStep(step(), hidden=True, output=False), PLAN_ID)


ODD = {
    "a hidden state that nothing announced": Odd(
        lambda pair, _link: pair.follower.accept_tensor(hidden_of(3)), HiddenError, "and no order before it"
    ),
    "an order in place of a hidden state": Odd(twice, StepError, "RankStep came in place of a hidden state"),
    "the hidden state of another step": Odd(
        announced(3, hidden_of(4)), HiddenError, "for step 4 and layer 1, expected 3 and 1"
    ),
    "a hidden state before another layer": Odd(
        announced(3, hidden_of(3, boundary=2)), HiddenError, "for step 3 and layer 2, expected 3 and 1"
    ),
    "more rows than were announced": Odd(
        announced(3, hidden_of(3, rows=3)), HiddenError, "3 rows for the output came, expected 2"
    ),
    "the output of a step that did not run": Odd(
        order(RankOutput(3, 1, hidden=False)), StepError, "step 3 is asked for, which did not run last"
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_order_that_makes_no_sense_is_refused(middle: list[HostStage], kind: str) -> None:
    with rank_pair(middle, num_kv_heads=NUM_KV_HEADS) as pair, pytest.raises(ODD[kind].error) as caught:
        ODD[kind].act(pair, pair.links[1])
    assert ODD[kind].said in caught.value.message


def test_a_step_is_run_once(stages: list[HostStage]) -> None:
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        pair.follow()
        pair.executor.submit(step(5), [GREEDY])
        wait_until(lambda: pair.follower.finished_step == 5)
        for number in (5, 4):
            with pytest.raises(StepError, match=f"step {number} came after step 5"):
                pair.follower.accept(
                    pair.links[1], RankStep(step(number), hidden=False, output=False), PLAN_ID
                )


def test_orders_of_another_plan_id_are_dropped(middle: list[HostStage]) -> None:
    with rank_pair(middle, num_kv_heads=NUM_KV_HEADS) as pair:
        link, old = pair.links[1], PLAN_ID - 1
        for message in (
            RankStep(step(), hidden=False, output=False),
            RankStep(step(), hidden=True, output=False),
            RankOutput(1, 1, hidden=False),
            ReadBlocks(1, SOURCE.digest, 1, 3, [0]),
        ):
            pair.follower.accept(link, message, old)  # a hidden state that it announces is not waited for
        for kind in (FrameType.HIDDEN, FrameType.BLOCKS):
            pair.follower.accept_tensor(
                ReceivedTensor(old, 1, 1, to_wire(torch.zeros(1, HIDDEN_SIZE)), kind=kind)
            )
        assert pair.follower.finished_step == -1
        assert link.sent_sealed_bytes == 0, "nothing was answered"


# K/V.


def test_k_v_that_rank_0_reads_has_the_heads_of_all_ranks_and_what_it_writes_reaches_each(
    stages: list[HostStage], alone: HostStage
) -> None:
    alone.make_pools(32)
    tokens = torch.tensor(TOKENS)
    alone.run(step(), None, tokens)
    expected = alone.read_blocks(0, NUM_LAYERS, [0, 1])
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        pair.follow()
        pair.leader.run(step(), None, tokens)
        found = pair.leader.read_blocks(0, NUM_LAYERS, [0, 1])
        assert found.shape == expected.shape == pair.leader.kv_shape(NUM_LAYERS, 2)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        pair.leader.write_blocks(0, [7, 8], TAGS, expected)
        assert torch.equal(pair.leader.read_blocks(0, NUM_LAYERS, [7, 8]), expected)
        own = NUM_KV_HEADS // 2
        for rank, stage in enumerate(stages):
            heads = expected[..., rank * own : (rank + 1) * own, :]
            assert torch.equal(stage.read_blocks(0, NUM_LAYERS, [7, 8]), heads)


def test_k_v_of_another_shape_reaches_no_rank(stages: list[HostStage]) -> None:
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        pair.follow()
        shape = list(pair.leader.kv_shape(NUM_LAYERS, 2))
        shape[-1] -= 1
        before = pair.links[0].sent_sealed_bytes
        with pytest.raises(StepError, match=r"has shape .*, expected "):
            pair.leader.write_blocks(0, [7, 8], TAGS, torch.zeros(shape))
        assert pair.links[0].sent_sealed_bytes == before


def test_a_rank_that_refuses_k_v_is_named_with_its_reason(stages: list[HostStage]) -> None:
    with rank_pair(stages, num_kv_heads=NUM_KV_HEADS) as pair:
        pair.follow()
        stages[1].forget()
        with pytest.raises(StepError, match="beta refused K/V of a session"):
            pair.leader.read_blocks(0, NUM_LAYERS, [0])
