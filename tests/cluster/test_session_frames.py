"""The link that may ask a stage for K/V, or send it some: only that of the head of its plan."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.sessions.session import Session
from convoy.errors import ConvoyError
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster
from convoy.wire.messages.control import BlocksDone, FrameType, Message, ReadBlocks, WriteBlocks
from convoy.wire.tensor import WireTensor
from support.cases import cases
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of
from support.waiting import wait_until

OPTIONS = HeadOptions(MEMBER, wait_s=60, num_blocks=32)
KV = WireTensor("float32", (2, 2, 16, 1, 1), bytes(2 * 2 * 16 * 4))


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def members() -> tuple[LocalMember, ...]:
    """Return alpha the head, gamma, which may be one of another plan, and delta, which may not."""
    four = make_local_members(["alpha", "beta", "gamma", "delta"])
    heads = {"alpha", "gamma"}
    listed = [member_of(m.name, m.identity, m.member.address, head=m.name in heads) for m in four]
    roster = make_roster("two-heads", listed)
    return tuple(LocalMember(m.name, m.identity, roster) for m in four)


@pytest.fixture
def peers(members: tuple[LocalMember, ...], network: MemoryNetwork) -> Iterator[dict[str, PeerThread]]:
    threads = {me.name: PeerThread(me, PeerOptions(MEMBER), network) for me in members[1:]}
    yield threads
    for thread in threads.values():
        thread.stop()


@pytest.fixture
def cluster(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peers: dict[str, PeerThread]
) -> Iterator[RunningCluster]:
    source = ModelSource.resolve("demo-mini")
    running = RunningCluster.start(membership_of(members[0]), source, OPTIONS, network=network)
    yield running
    running.close()


def plan_of(cluster: RunningCluster) -> tuple[int, str]:
    assert cluster.head.active_plan is not None
    plan = cluster.head.active_plan.plan
    return plan.plan_id, plan.model_digest


@pytest.mark.parametrize("who", cases(["gamma", "delta"], "gamma".__eq__))
@pytest.mark.parametrize("what", ["read", "write", "tensor"])
def test_a_member_that_is_not_the_plans_head_gets_and_gives_no_kv(
    cluster: RunningCluster, members: tuple[LocalMember, ...], network: MemoryNetwork, who: str, what: str
) -> None:
    plan_id, digest = plan_of(cluster)
    me = next(member for member in members if member.name == who)
    link = network.dial(membership_of(me), members[1].member, 5)
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    ended: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
    everything = frozenset({FrameType.BLOCKS, FrameType.BLOCKS_DONE, FrameType.STEP_FAILED})
    link.start(lambda _link, item: heard.put(item), lambda _link, error: ended.put(error), everything)
    if what == "tensor":
        link.send_tensor(KV, plan_id=plan_id, step=1, boundary=2, kind=FrameType.BLOCKS)
    else:
        asked: dict[str, Message] = {
            "read": ReadBlocks(1, digest, 2, 4, [0]),
            "write": WriteBlocks(1, digest, [0], bytes(16)),
        }
        link.send(asked[what], plan_id=plan_id, step=1)
    ended.get(timeout=60)
    assert heard.empty()
    with cluster.session() as session:
        assert session.sync([1, 2, 3]) == 3, "the plan goes on"


@pytest.mark.parametrize("what", ["tensor", "message"])
def test_kv_that_nobody_asked_for_is_never_taken_for_an_answer(
    cluster: RunningCluster, peers: dict[str, PeerThread], what: str, tmp_path: Path
) -> None:
    """A stage that sends some has broken its plan, and a session survives that; a word alone is not heard."""
    plan_id, _ = plan_of(cluster)
    to_head: Link | None = peers["beta"].peer.head
    assert to_head is not None
    with cluster.session() as session:
        session.sync(range(40))
        logits = session.logits()
        if what == "tensor":
            to_head.send_tensor(KV, plan_id=plan_id, step=9, boundary=2, kind=FrameType.BLOCKS)
        else:
            to_head.send(BlocksDone(9, "no"), plan_id=plan_id, step=9)
        wait_until(lambda: _step_once(session) and cluster.engine.stats().recoveries == (what == "tensor"))
        session.save(tmp_path / "chat", None)
        session.load(tmp_path / "chat")
        assert np.allclose(session.logits(), logits, atol=1e-4)


def _step_once(session: Session) -> bool:
    session.eval(1)
    session.rewind(40)
    return True
