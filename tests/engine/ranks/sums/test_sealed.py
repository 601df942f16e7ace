"""Ranks that add up over sealed links: the bits, the order, the end, and what a hostile rank may send."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.engine.ranks.sums import sealed
from convoy.engine.ranks.sums.mailbox import MAX_HELD_BYTES, PartMailbox, code_of
from convoy.engine.ranks.sums.pieces import PIECE_ELEMENTS
from convoy.engine.ranks.sums.sealed import PART, SHARE, SealedCollective
from convoy.errors import CollectiveError, ConvoyError, LinkBroken, StageLost, StepError
from convoy.testing.links import memory_link_pair
from convoy.testing.streams import Cut, Drop, FlipBit, Reorder, Repeat, Stall
from convoy.transport.link.link import Link, Received, ReceivedTensor
from convoy.transport.link.outgoing import OutgoingFrame
from convoy.wire.messages.control import FrameType
from convoy.wire.messages.ranks import Agree
from convoy.wire.tensor import WireTensor
from support.cases import cases
from support.link_parts import outgoing_of
from support.links import End
from support.members import make_local_members
from support.rings import RankRing, rank_ring, run_at_once
from support.waiting import wait_until

SHAPES = [(1,), (0, 8), (3, 5), (2, 2, 3), (1, 2048), (33, 2048), (2, 40_000), (70, 2048)]
TYPES = ["float32", "bfloat16"]


class Crossed:
    """Deliver the frames of a rank's two links in another order, that of each link kept."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._waiting: dict[Link, list[Received]] = {}

    def wrap(self, _rank: int, deliver: Callable[[Link, Received], bool]) -> Callable[[Link, Received], bool]:
        def later(link: Link, received: Received) -> bool:
            with self._lock:
                self._waiting.setdefault(link, []).append(received)
                chosen = self._random.choice([link for link, items in self._waiting.items() if items])
            if chosen is not link:
                time.sleep(0.001 * self._random.random())  # the other link's thread overtakes
            with self._lock:
                item = self._waiting[link].pop(0)
            return deliver(link, item)

        return later


@pytest.fixture(scope="module")
def rings() -> Iterator[dict[int, RankRing]]:
    with ExitStack() as stack:
        yield {size: stack.enter_context(rank_ring(size, wrap=Crossed(size).wrap)) for size in (2, 3, 4, 5)}


def parts_of(world_size: int, shape: tuple[int, ...], dtype: str, seed: int) -> list[torch.Tensor]:
    """Make parts of sizes so different that another order of sums has other bits."""
    made = np.random.default_rng(seed)
    scale = 10.0 ** made.integers(-3, 4, size=(world_size, *shape))
    whole = (made.standard_normal((world_size, *shape)) * scale).astype("float32")
    return [torch.from_numpy(part).to(getattr(torch, dtype)) for part in whole]


def slow_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Compute ((p0 + p1) + p2) + ... of float32, by numpy, and round to bfloat16 by hand if asked."""
    total = parts[0].float().numpy().copy()
    for part in parts[1:]:
        total = np.add(total, part.float().numpy(), dtype=np.float32)
    if parts[0].dtype is torch.float32:
        return torch.from_numpy(total)
    bits = total.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
    return torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16)


@settings(max_examples=40)
@given(st.integers(2, 5), st.sampled_from(SHAPES), st.sampled_from(TYPES), st.integers(0, 2**31))
def test_all_ranks_get_the_bits_of_the_slow_sum(
    rings: dict[int, RankRing], world_size: int, shape: tuple[int, ...], dtype: str, seed: int
) -> None:
    parts = parts_of(world_size, shape, dtype, seed)
    expected = slow_sum(parts)
    order = random.Random(seed)

    def add(one: SealedCollective) -> torch.Tensor:
        time.sleep(0.002 * order.random())  # ranks come in any order
        return one.all_reduce(parts[one.rank])

    for found in rings[world_size].run(add):
        assert isinstance(found, torch.Tensor), found
        assert torch.equal(found, expected)


@pytest.mark.parametrize("world_size", [4, 5])
@pytest.mark.parametrize("dtype", TYPES)
def test_along_the_chain_and_round_the_ring_have_the_same_bits(
    rings: dict[int, RankRing], world_size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(world_size, (3, PIECE_ELEMENTS), dtype, 3)
    found = []
    for least in (1, 10**9):
        for one in rings[world_size].collectives:
            monkeypatch.setattr(one, "chain_pieces", least)
        found.append(rings[world_size].run(lambda one: one.all_reduce(parts[one.rank])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(1, 100), (2, 50_000)])
def test_rank_0_gathers_in_the_order_of_ranks(
    rings: dict[int, RankRing], world_size: int, shape: tuple[int, ...]
) -> None:
    parts = parts_of(world_size, shape, "float32", 9)
    for _ in range(3):  # the others run ahead without waiting
        first, *others = rings[world_size].run(lambda one: one.gather(parts[one.rank]))
        assert isinstance(first, list)
        assert all(torch.equal(a, b) for a, b in zip(first, parts, strict=True))
        assert others == [None] * (world_size - 1)


def test_what_is_given_may_change_as_soon_as_the_sum_is_there(rings: dict[int, RankRing]) -> None:
    parts = parts_of(4, (70, 2048), "float32", 5)
    expected = slow_sum(parts)

    def add_and_spoil(one: SealedCollective) -> torch.Tensor:
        own = parts[one.rank].clone()
        total = one.all_reduce(own)
        found = total.clone()
        own.fill_(7)
        total.fill_(7)
        return found

    for _ in range(3):
        assert all(torch.equal(found, expected) for found in rings[4].run(add_and_spoil))  # type: ignore[arg-type]


def test_a_delay_changes_nothing_but_the_time() -> None:
    stall = Stall(4)
    parts = parts_of(3, (33, 2048), "float32", 1)
    with rank_ring(3, faults=[stall]) as ring:
        threading.Timer(0.2, stall.release.set).start()
        for found in ring.run(lambda one: one.all_reduce(parts[one.rank])):
            assert torch.equal(found, slow_sum(parts))  # type: ignore[arg-type]


FAULTS = [Drop(3), FlipBit(3, 700), FlipBit(3, 9), Cut(3, 20), Reorder(3), Repeat(3)]


@pytest.mark.parametrize(
    ("fault", "world_size"),
    # Three ranks meet every fault, and two meet one.
    cases(itertools.product(FAULTS, (2, 3)), lambda case: case[1] == 3 or case[0] is FAULTS[0]),
    ids=repr,
)
def test_a_fault_of_the_network_ends_it_by_name_and_never_changes_a_sum(
    fault: Drop | FlipBit | Cut | Reorder | Repeat, world_size: int
) -> None:
    parts = parts_of(world_size, (1, 512), "float32", 2)

    def add(one: SealedCollective) -> int:
        for number in range(6):
            assert torch.equal(one.all_reduce(parts[one.rank]), slow_sum(parts)), number
        return 6

    with rank_ring(world_size, faults=[fault], deadline_s=1.5) as ring:
        found = ring.run(add)
    errors = [one for one in found if isinstance(one, CollectiveError)]
    assert len(errors) >= 2
    assert any(error.rank is not None and "link to rank" in error.message for error in errors)


@pytest.mark.parametrize("world_size", cases([2, 4], lambda size: size == 4))
def test_a_rank_that_says_nothing_is_named_with_the_operation(world_size: int) -> None:
    with rank_ring(world_size, deadline_s=1.5) as ring:
        ring.run(lambda one: one.all_reduce(torch.ones(3)))
        found = run_at_once(
            [lambda one=one: one.all_reduce(torch.ones(3)) for one in ring.collectives if one.rank != 1]  # type: ignore[misc]
        )
    assert all(isinstance(error, CollectiveError) and isinstance(error, StageLost) for error in found)
    said = [error.message for error in found if isinstance(error, CollectiveError) and error.rank == 1]
    assert "rank 1 sent nothing of operation 1, an all-reduce, within 1.5 s" in said


def test_a_lost_link_wakes_who_waits_and_later_operations_say_the_same() -> None:
    with rank_ring(2) as ring:
        threading.Timer(0.1, ring.links[1, 0].close).start()
        found = run_at_once([lambda: ring.collectives[0].all_reduce(torch.ones(3))])
        again = run_at_once([lambda: ring.collectives[0].gather(torch.ones(3))])
    assert isinstance(found[0], CollectiveError)
    assert "the link to rank 1 ended" in found[0].message
    assert again == found


def test_abort_wakes_who_waits() -> None:
    with rank_ring(2) as ring:
        why = ConvoyError("the plan is over")
        threading.Timer(0.1, ring.collectives[0].abort, [why]).start()
        found = run_at_once([lambda: ring.collectives[0].all_reduce(torch.ones(3))])
    assert isinstance(found[0], CollectiveError)
    assert found[0].message == "the plan is over"


def test_what_comes_before_its_operation_is_bounded_and_holds_the_sender_back() -> None:
    parts = parts_of(2, (20, PIECE_ELEMENTS), "float32", 4)
    with rank_ring(2) as ring:
        first = ring.collectives[0]
        found: list[torch.Tensor] = []
        ahead = threading.Thread(target=lambda: found.append(ring.collectives[1].all_reduce(parts[1])))
        ahead.start()
        wait_until(lambda: first.held_bytes + 4 * PIECE_ELEMENTS > MAX_HELD_BYTES)
        time.sleep(0.1)
        assert 0 < first.held_bytes <= MAX_HELD_BYTES
        assert ahead.is_alive()
        assert torch.equal(ring.collectives[0].all_reduce(parts[0]), slow_sum(parts))
        ahead.join(10)
        assert torch.equal(found[0], slow_sum(parts))


def test_parts_without_elements_take_room_too() -> None:
    box = PartMailbox(5.0)
    empty = ReceivedTensor(1, 0, code_of(PART, 1), WireTensor("float32", (0,), b""), FrameType.PARTIAL)

    def flood() -> None:
        for _ in range(10_000):
            box.put(1, empty, waits=False)

    with pytest.raises(StepError, match="waits in operation 0"):
        flood()


# A rank that sends what no rank sends.


class Hostile:
    """Rank 1 of two, played by hand; ``link`` is its end."""

    def __init__(self, world_size: int = 2, deadline_s: float = 5.0) -> None:
        me, other = make_local_members(["alpha", "beta"])
        self.mine, self.link = memory_link_pair(me, other)
        links = dict.fromkeys(range(1, world_size), self.mine)
        self.collective = SealedCollective(0, world_size, links, 5, deadline_s)
        self.not_taken: list[Received] = []
        self.ended: list[ConvoyError] = []
        self.over = threading.Event()

        def deliver(link: Link, received: Received) -> None:
            if not self.collective.deliver(link, received):
                self.not_taken.append(received)

        def ended(link: Link, error: ConvoyError) -> None:
            self.ended.append(error)
            self.collective.link_ended(link, error)
            self.over.set()

        self.mine.start(deliver, ended, sealed.RANK_TYPES)
        End(self.link).start(sealed.RANK_TYPES)

    def send(self, tensor: WireTensor, *, number: int = 0, code: int = 1, plan_id: int = 5) -> None:
        self.link.send_tensor(tensor, plan_id=plan_id, step=number, boundary=code, kind=FrameType.PARTIAL)

    def add(self) -> torch.Tensor | ConvoyError:
        return run_at_once([lambda: self.collective.all_reduce(torch.ones(3))])[0]


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    made = Hostile()
    yield made
    run_at_once([made.link.close, made.mine.close])


ONES = WireTensor("float32", (3,), np.ones(3, "float32").tobytes())
NONSENSE: dict[str, tuple[WireTensor, int, int, str]] = {
    "another shape": (WireTensor("float32", (1, 3), ONES.data), 0, 1, "of shape [1, 3] in operation 0"),
    "another size": (WireTensor("float32", (4,), bytes(16)), 0, 1, "expected float32 of [3]"),
    "another dtype": (WireTensor("bfloat16", (3,), bytes(6)), 0, 1, "sent bfloat16 of shape [3]"),
    "what no sum has": (WireTensor("float16", (3,), bytes(6)), 0, 1, "sent float16"),
    "another rank's part": (ONES, 0, code_of(PART, 2), "sent an unexpected or repeated part"),
    "this rank's own part": (ONES, 0, code_of(PART, 0), "sent an unexpected or repeated part"),
    "a share in a sum": (ONES, 0, code_of(SHARE, 1), "sent an unexpected or repeated part"),
    "a kind that is none": (ONES, 0, 0xFF01, "sent an unexpected or repeated part"),
    "an operation far ahead": (ONES, 2**63, 1, "is at operation 9223372036854775808"),
}


@pytest.mark.parametrize("case", NONSENSE)
@pytest.mark.parametrize("begun", [False, True], ids=["before", "meanwhile"])
def test_nonsense_of_a_rank_is_refused_by_name(hostile: Hostile, case: str, begun: bool) -> None:
    tensor, number, code, said = NONSENSE[case]
    if begun:
        threading.Timer(0.1, lambda: hostile.send(tensor, number=number, code=code)).start()
    else:
        hostile.send(tensor, number=number, code=code)
        with contextlib.suppress(LinkBroken):
            hostile.link.ping(5)
    found = hostile.add()
    assert isinstance(found, CollectiveError), found
    assert said in found.message
    assert found.rank == 1
    assert hostile.over.wait(10)
    assert type(hostile.ended[0]).__name__ in ({"StepError"} if begun else {"StepError", "LinkClosed"})


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_that_comes_twice_or_too_late_ends_the_link(hostile: Hostile, number: int) -> None:
    for each in range(number + 1):
        hostile.send(ONES, number=each)
        assert torch.equal(hostile.add(), torch.full((3,), 2.0))  # type: ignore[arg-type]
    hostile.send(ONES, number=0)
    assert hostile.over.wait(10)
    assert "sent a part of operation 0, which is over" in hostile.ended[0].message


def test_parts_of_an_older_plan_are_dropped_and_those_of_a_newer_one_are_not_taken(
    hostile: Hostile,
) -> None:
    hostile.send(WireTensor("float32", (9,), bytes(36)), plan_id=4)
    hostile.send(WireTensor("float32", (9,), bytes(36)), plan_id=6)
    hostile.send(ONES)
    assert torch.equal(hostile.add(), torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert [received.plan_id for received in hostile.not_taken] == [6]


def test_a_part_longer_than_a_record_is_refused_before_it_takes_memory(hostile: Hostile) -> None:
    size = 4 * (PIECE_ELEMENTS + 1)
    long = WireTensor("float32", (PIECE_ELEMENTS + 1,), bytes(size))
    with contextlib.suppress(LinkBroken):
        outgoing_of(hostile.link).send(OutgoingFrame(FrameType.PARTIAL, 5, 0, 1, tensor=long))
    assert hostile.over.wait(10)
    assert type(hostile.ended[0]).__name__ == "FrameTooLong"


def test_a_link_that_is_of_no_rank_is_not_listened_to(hostile: Hostile) -> None:
    stranger = memory_link_pair(*make_local_members(["alpha", "beta"]))[0]
    received = ReceivedTensor(5, 0, 1, ONES, FrameType.PARTIAL)
    assert not hostile.collective.deliver(stranger, received)


# What ranks say before they begin.

SAID = Agree(5, 0, 2, bytes(range(32)), "float32", "ab" * 32)


def agreement(**changed: object) -> Agree:
    import msgspec

    return msgspec.structs.replace(SAID, **changed)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_ranks_that_mean_the_same_agree(world_size: int) -> None:
    with rank_ring(world_size, plan_id=5) as ring:
        found = ring.run(lambda one: one.agree(agreement(rank=one.rank, world_size=world_size)))
    assert found == [None] * world_size


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"plan_digest": bytes(32)}, "plan digest 0000000000000000, and rank 0 for 0001020304050607"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, and rank 0 for float32"),
        ({"manifest": ""}, "manifest none, and rank 0 for abab"),
        ({"world_size": 3}, "world size 3, and rank 0 for 2"),
        ({"plan_id": 6}, "plan id 6, and rank 0 for 5"),
    ],
)
def test_ranks_that_mean_something_else_name_the_rank_and_both_values(
    changed: dict[str, object], said: str
) -> None:
    with rank_ring(2, plan_id=5) as ring:
        found = ring.run(lambda one: one.agree(agreement(rank=one.rank, **(changed if one.rank else {}))))
    assert all(isinstance(error, CollectiveError) for error in found)
    assert isinstance(found[0], CollectiveError)
    assert found[0].message == f"rank 1 is here for {said}" or said in found[0].message
    assert found[0].rank == 1


def test_a_rank_that_speaks_for_another_ends_the_link(hostile: Hostile) -> None:
    for rank in (0, 2):
        made = Hostile()
        made.link.send(agreement(rank=rank), plan_id=5)
        assert made.over.wait(10)
        assert f"rank 1 announced a plan for rank {rank}, unexpectedly or again" in made.ended[0].message


def test_a_rank_that_does_not_say_what_it_is_for_is_named() -> None:
    with rank_ring(3, plan_id=5, deadline_s=0.3) as ring:
        found = run_at_once([lambda: ring.collectives[0].agree(agreement(world_size=3))])
    assert isinstance(found[0], CollectiveError)
    assert found[0].message == f"rank {found[0].rank} did not announce its plan within 0.3 s"
