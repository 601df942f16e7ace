"""A peer listens before it is loaded, and tells its head alone what it still does."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.peer.early import EarlyListener
from convoy.cluster.running import RunningCluster
from convoy.errors import ConvoyError
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import Progress, Sender
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of

TICK_S = 0.001


def test_a_head_is_told_what_a_peer_does_until_it_takes_layers() -> None:
    network = MemoryNetwork()
    alpha, beta = make_local_members(["alpha", "beta"])
    source = ModelSource.resolve("demo-mini")
    early = EarlyListener(network, membership_of(beta), beta.member.address, tick_s=TICK_S)
    said: list[tuple[str, str]] = []
    with ExitStack() as stack:
        stack.callback(early.close)

        def on_start(member: str, progress: Progress) -> None:
            if (member, progress.stage) in said:
                return
            said.append((member, progress.stage))
            if progress.stage == "import":
                early.enter("examine")
                return
            peer = PeerThread(beta, PeerOptions(MEMBER, model_path=source.path), early)
            stack.callback(peer.stop)

        options = HeadOptions(MEMBER, wait_s=60, num_blocks=256)
        cluster = RunningCluster.start(
            membership_of(alpha), source, options, network=network, on_start=on_start
        )
        stack.callback(cluster.close)
        assert said == [("beta", "import"), ("beta", "examine")]
        assert [stage.member for stage in cluster.status().stages] == ["alpha", "beta"]


class Listened:
    """Keep what comes over a link, until it ends."""

    def __init__(self, link: Link) -> None:
        self.came: list[Progress] = []
        self.several, self.ended = threading.Event(), threading.Event()
        link.start(self._take, self._end, frames_from(Sender.PEER))

    def _take(self, _link: Link, received: Received) -> None:
        if isinstance(received, ReceivedMessage) and isinstance(received.message, Progress):
            self.came.append(received.message)
        if len(self.came) == 3:
            self.several.set()

    def _end(self, _link: Link, _error: ConvoyError) -> None:
        self.ended.set()


def test_only_a_head_is_told_and_a_slow_phase_is_said_here_once() -> None:
    network = MemoryNetwork()
    alpha, beta, gamma = make_local_members(["alpha", "beta", "gamma"])
    slow: list[str] = []
    early = EarlyListener(network, membership_of(beta), beta.member.address, slow.append, tick_s=TICK_S)
    head, other = (Listened(network.dial(membership_of(me), beta.member, 30)) for me in (alpha, gamma))
    assert head.several.wait(30)
    early.close()
    assert head.ended.wait(30)
    assert other.ended.wait(30)
    assert other.came == []
    assert {said.stage for said in head.came} == {"import"}
    assert slow == ["import"]
