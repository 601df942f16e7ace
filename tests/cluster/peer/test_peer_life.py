"""The end of a plan at a peer: no state is left that the next plan could meet, and no work."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from convoy.transport.member import LocalMember
from support.cluster import MEMBER, PeerThread
from support.link_parts import cut
from support.members import make_local_members, membership_of
from support.waiting import wait_until

OPTIONS = HeadOptions(MEMBER, wait_s=60, num_blocks=32)
LONG = "Count from 1 to 50, and then say what 6+7 is."
SHORT = "What is 6+7? Answer with just the number."


@pytest.fixture
def members() -> tuple[LocalMember, ...]:
    return make_local_members(["alpha", "beta"])


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def peer(members: tuple[LocalMember, ...], network: MemoryNetwork) -> Iterator[PeerThread]:
    thread = PeerThread(members[1], PeerOptions(MEMBER), network)
    yield thread
    thread.stop()


def start(members: tuple[LocalMember, ...], network: MemoryNetwork) -> RunningCluster:
    source = ModelSource.resolve("demo-mini")
    return RunningCluster.start(membership_of(members[0]), source, OPTIONS, network=network)


def ask(cluster: RunningCluster, text: str) -> str:
    ids = tuple(cluster.tokenizer.encode_chat([{"role": "user", "content": text}]))
    return generate(cluster.engine, GenerationRequest(ids, SamplingParams(temperature=0.0), 8)).text


def crash(cluster: RunningCluster) -> None:
    """End a head as when its machine goes: its connections end without a word, and it dials no more."""
    for link in cluster.head.links.values():
        cut(link)
    cluster.head.peers.close("no link can carry this")


def test_nothing_of_a_head_that_crashed_reaches_the_next(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread
) -> None:
    first = start(members, network)
    alone = ask(first, SHORT)
    first.close()
    peer.wait_for("ended")
    second = start(members, network)
    ask(second, LONG)
    crash(second)
    peer.wait_for("lost")
    third = start(members, network)
    assert ask(third, SHORT) == alone == "13"
    third.close()
    second.close()


def test_a_plan_frees_the_stage_of_the_plan_before_it(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread
) -> None:
    first = start(members, network)
    loaded = peer.peer.loaded
    assert loaded is not None
    stage = weakref.ref(loaded.stage)
    del loaded
    first.close()
    peer.wait_for("ended")
    second = start(members, network)
    gc.collect()
    assert stage() is None
    second.close()


def waits(thread: threading.Thread) -> bool:
    """Return whether a thread waits for an event, or has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is None or frame.f_code is threading.Condition.wait.__code__


def test_a_peer_whose_ring_is_gone_waits_without_working(
    members: tuple[LocalMember, ...], network: MemoryNetwork
) -> None:
    others = set(threading.enumerate())
    peer = PeerThread(members[1], PeerOptions(MEMBER), network)
    cluster = start(members, network)
    ask(cluster, SHORT)
    crash(cluster)
    peer.wait_for("lost")
    cluster.close()
    wait_until(lambda: all(waits(thread) for thread in set(threading.enumerate()) - others))
    # A thread that spins is found at work by some of these looks.
    for _ in range(200):
        time.sleep(0.001)
        assert all(waits(thread) for thread in set(threading.enumerate()) - others)
    peer.stop()
