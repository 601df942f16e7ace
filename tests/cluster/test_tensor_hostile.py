"""What a member that is no rank of a stage, or not its rank 0, may not do to those that are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.peer.loaded_plan import LoadedPlan
from convoy.cluster.peer.ranks import RankPeers
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import LinkBroken
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.links import memory_link_pair
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember
from convoy.wire.messages.control import FrameType, Plan, ReadBlocks, StageAssignment, Step, WriteBlocks
from convoy.wire.messages.ranks import Agree, RankOutput, RankStep
from convoy.wire.tensor import WireTensor
from support.cases import cases
from support.cluster import MEMBER, NAMES, PeerThread
from support.members import make_local_members, membership_of

SPANS = {"alpha": "0:1,output", "beta+gamma": "2:3"}
TENSOR = WireTensor("float32", (1, 192), bytes(4 * 192))
EMPTY = Step(7, [], [], [], b"")


@dataclass
class Scene:
    cluster: RunningCluster
    network: MemoryNetwork
    members: tuple[LocalMember, ...]

    @property
    def plan_id(self) -> int:
        assert self.cluster.head.active_plan is not None
        return self.cluster.head.active_plan.plan.plan_id

    def ask(self) -> str:
        request = GenerationRequest(tuple(range(5, 35)), SamplingParams(temperature=0.0), 8)
        return generate(self.cluster.engine, request).text


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    network, members = MemoryNetwork(), make_local_members(NAMES)
    peers = [PeerThread(me, PeerOptions(MEMBER, standby=me is members[3]), network) for me in members[1:]]
    cluster = RunningCluster.start(
        membership_of(members[0]),
        ModelSource.resolve("demo-mini"),
        HeadOptions(MEMBER, spans=SPANS, wait_s=60, num_blocks=32),
        network=network,
    )
    yield Scene(cluster, network, members)
    cluster.close()
    for peer in peers:
        peer.stop()


def partial(link: Link, plan_id: int) -> None:
    link.send_tensor(TENSOR, plan_id=plan_id, step=3, boundary=0, kind=FrameType.PARTIAL)


def hidden(link: Link, plan_id: int) -> None:
    link.send_tensor(TENSOR, plan_id=plan_id, step=7, boundary=2)


def blocks(link: Link, plan_id: int) -> None:
    link.send_tensor(TENSOR, plan_id=plan_id, step=7, boundary=2, kind=FrameType.BLOCKS)


def says(message: object) -> Callable[[Link, int], None]:
    def say(link: Link, plan_id: int) -> None:
        link.send(message, plan_id=plan_id, step=7)  # type: ignore[arg-type]

    return say


ATTACKS: dict[str, Callable[[Link, int], None]] = {
    "a part of a sum": partial,
    "a hidden state": hidden,
    "K/V": blocks,
    "what it is there for": says(Agree(1, 1, 2, b"d" * 32, "float32", "")),
    "an order": says(RankStep(EMPTY, hidden=False, output=False)),
    "an order about the output": says(RankOutput(7, 1, hidden=False)),
    "a step": says(EMPTY),
    "a question for K/V": says(ReadBlocks(1, "0" * 64, 2, 4, [0])),
    "K/V to come": says(WriteBlocks(1, "0" * 64, [0], b"t" * 16)),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("victim", cases([1, 2], (2).__eq__), ids=["rank 0", "rank 1"])
def test_a_member_that_is_no_rank_of_the_stage_is_cut_off_and_disturbs_nobody(
    scene: Scene, attack: str, victim: int
) -> None:
    answer, recoveries = scene.ask(), scene.cluster.engine.stats().recoveries
    link = scene.network.dial(membership_of(scene.members[3]), scene.members[victim].member, 5)
    ended = threading.Event()
    link.start(lambda _link, _item: None, lambda _link, _error: ended.set(), frozenset())
    ATTACKS[attack](link, scene.plan_id)
    assert ended.wait(10), "the offending link must end"
    assert scene.ask() == answer
    assert scene.cluster.engine.stats().recoveries == recoveries


def test_a_second_link_of_a_rank_gives_no_orders(scene: Scene) -> None:
    """beta leads gamma, over the link that it dialled when the plan was activated and over no other."""
    answer, recoveries = scene.ask(), scene.cluster.engine.stats().recoveries
    link = scene.network.dial(membership_of(scene.members[1]), scene.members[2].member, 5)
    ended = threading.Event()
    link.start(lambda _link, _item: None, lambda _link, _error: ended.set(), frozenset())
    link.send(RankStep(EMPTY, hidden=False, output=False), plan_id=scene.plan_id, step=7)
    assert ended.wait(10)
    assert scene.ask() == answer
    assert scene.cluster.engine.stats().recoveries == recoveries


def test_a_link_of_a_plan_that_is_over_leads_nobody_and_its_end_is_not_that_of_the_ranks() -> None:
    beta, gamma = make_local_members(["beta", "gamma"])
    old, _ = memory_link_pair(gamma, beta)
    new, _ = memory_link_pair(gamma, beta)
    stage = StageAssignment("beta", 0, 4, True, True, ["beta", "gamma"])
    plan = Plan(2, "demo-mini", "0" * 64, [stage], "exact-f32", "float32", 16, 64)
    group = RankPeers(plan, b"", 0, "gamma", 2, join_s=15.0)
    loaded = LoadedPlan(plan, b"", cast("HostStage", None), 0, 0, ranks=group)
    assert not loaded.is_led_by(old, 1)
    assert loaded.is_led_by(new, 2)
    assert not loaded.is_led_by(old, 2)
    group.ended(old, LinkBroken("its plan is over"))
    assert group.error is None
