"""Three members in a ring, and what one of them, or a stranger to the ring, may not do to the others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import PeerRefused
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember
from convoy.transport.options import LinkOptions
from convoy.wire.tensor import WireTensor
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of
from support.waiting import wait_until

OPTIONS = HeadOptions(MEMBER, wait_s=60, num_blocks=32)


@pytest.fixture
def network() -> MemoryNetwork:
    # A link waits for an hour if its goodbye is not read.
    return MemoryNetwork(LinkOptions(close_timeout_s=3600.0))


@pytest.fixture
def members() -> tuple[LocalMember, ...]:
    return make_local_members(["alpha", "beta", "gamma"])


@pytest.fixture
def peers(members: tuple[LocalMember, ...], network: MemoryNetwork) -> Iterator[list[PeerThread]]:
    threads = [PeerThread(me, PeerOptions(MEMBER), network) for me in members[1:]]
    yield threads
    for thread in threads:
        thread.stop()


@pytest.fixture
def cluster(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peers: list[PeerThread]
) -> Iterator[RunningCluster]:
    running = RunningCluster.start(
        membership_of(members[0]), ModelSource.resolve("demo-mini"), OPTIONS, network=network
    )
    yield running
    running.close()


def ask(cluster: RunningCluster) -> str:
    prompt = [{"role": "user", "content": "What is 8+9? Answer with just the number."}]
    ids = tuple(cluster.tokenizer.encode_chat(prompt))
    return generate(cluster.engine, GenerationRequest(ids, SamplingParams(temperature=0.0), 8)).text


def open_link(network: MemoryNetwork, me: LocalMember, to: LocalMember) -> tuple[Link, threading.Event]:
    link = network.dial(membership_of(me), to.member, 5)
    ended = threading.Event()
    link.start(lambda _link, _item: None, lambda _link, _error: ended.set(), frozenset())
    return link, ended


def hidden_state(num_rows: int = 1) -> WireTensor:
    return WireTensor("float32", (num_rows, 192), bytes(num_rows * 192 * 4))


@pytest.mark.parametrize("same_plan_id", [True, False])
def test_a_member_that_is_not_the_predecessor_cannot_end_a_plan(
    cluster: RunningCluster,
    members: tuple[LocalMember, ...],
    network: MemoryNetwork,
    same_plan_id: bool,
) -> None:
    active = cluster.head.active_plan
    assert active is not None
    link, ended = open_link(network, members[2], members[1])
    plan_id = active.plan.plan_id if same_plan_id else 99
    link.send_tensor(hidden_state(), plan_id=plan_id, step=1, boundary=active.plan.stages[1].start)
    if same_plan_id:
        assert ended.wait(10), "the offending link must end"
    link.close("done")
    assert ask(cluster) == "17"


def test_members_that_are_turned_away_and_do_not_hang_up_hold_up_no_step(
    cluster: RunningCluster, members: tuple[LocalMember, ...], network: MemoryNetwork
) -> None:
    answer, active = ask(cluster), cluster.head.active_plan
    assert active is not None
    gamma = membership_of(members[2])
    for _ in range(8):  # never started, so the goodbye is not read: each would cost its hour
        link = network.dial(gamma, members[1].member, 5)
        stray = WireTensor("float32", (1,), bytes(4))
        link.send_tensor(stray, plan_id=active.plan.plan_id, step=1, boundary=1)
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(ask(cluster)), daemon=True).start()
    assert answers.get(timeout=60) == answer
    now = cluster.head.active_plan
    assert now is not None
    assert now.plan.plan_id == active.plan.plan_id, "no peer was given up meanwhile"


def test_a_second_link_of_a_neighbour_that_ends_ends_nothing(
    cluster: RunningCluster, members: tuple[LocalMember, ...], network: MemoryNetwork
) -> None:
    for _ in range(3):
        link, _ended = open_link(network, members[1], members[2])
        link.close("never mind")
    assert ask(cluster) == "17"


def test_a_peer_cannot_answer_the_head_in_place_of_the_last_stage(
    cluster: RunningCluster, peers: list[PeerThread], caplog: pytest.LogCaptureFixture
) -> None:
    active = cluster.head.active_plan
    assert active is not None
    beta = peers[0].peer
    loaded = beta.loaded
    assert loaded is not None
    assert loaded.loop is not None
    assert beta.head is not None
    # beta sends what it computed straight to the head, under gamma's boundary
    real, head_link, last = loaded.loop.successor, beta.head, active.plan.stages[-1].end

    class Shortcut:
        def send_tensor(self, tensor: WireTensor, *, plan_id: int, step: int, boundary: int) -> None:
            assert boundary != last
            head_link.send_tensor(tensor, plan_id=plan_id, step=step, boundary=last)

    loaded.loop.successor = Shortcut()  # type: ignore[assignment]
    with caplog.at_level("WARNING"):
        assert ask(cluster) == "17", "the plan is over, and the next one answers"
    assert "a member that is not the last stage" in caplog.text
    assert cluster.engine.stats().recoveries == 1
    loaded.loop.successor = real


def test_restarting_the_head_leaves_no_link_and_no_thread_behind(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peers: list[PeerThread]
) -> None:
    before = set(threading.enumerate())  # what other tests left behind is not this one's to wait for

    def left() -> list[str]:
        return sorted(thread.name for thread in set(threading.enumerate()) - before)

    for _ in range(4):
        cluster = RunningCluster.start(
            membership_of(members[0]), ModelSource.resolve("demo-mini"), OPTIONS, network=network
        )
        assert ask(cluster) == "17"
        cluster.close()
        for peer in peers:
            # A neighbour's goodbye may come before the head's own.
            while "alpha closed the link" not in (event := peer.events.get(timeout=30)).text:
                assert event.kind != "lost", "an end in order is no loss"
            assert event.kind == "ended"
        # what proves this member lives as long as it: one thread of each peer
        wait_until(lambda: left() == ["attestation prove"] * len(peers))


def test_a_successor_that_cannot_be_reached_is_told_to_the_head_at_once(
    members: tuple[LocalMember, ...],
    network: MemoryNetwork,
    peers: list[PeerThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from convoy.errors import PeerUnreachable

    real = MemoryNetwork.dial

    def dial(self: MemoryNetwork, me: LocalMember, peer: object, timeout_s: float) -> Link:
        if me.name == "beta":
            raise PeerUnreachable("gamma at 127.0.0.1:7002 could not be reached: cut cable")
        return real(self, me, peer, timeout_s)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryNetwork, "dial", dial)
    with pytest.raises(PeerRefused, match=r"beta refused the plan: gamma at 127\.0\.0\.1:7002 could not"):
        RunningCluster.start(
            membership_of(members[0]), ModelSource.resolve("demo-mini"), OPTIONS, network=network
        )
