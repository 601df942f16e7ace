"""A peer listens before it is loaded, and tells its head alone what it still does."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.peer.early import EarlyListener
from convoy.cluster.running import RunningCluster
from convoy.errors import ConvoyError, LinkBroken
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.transport.member import LocalMember
from convoy.transport.membership import Membership
from convoy.transport.network import Listening, OnLink
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import Message, Progress, Sender
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


class Noting(MemoryNetwork):
    """Keep the listener's end of each link in ``links``."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Link] = []

    def listen(self, me: Membership, bind: tuple[str, int], on_link: OnLink) -> Listening:
        def note(link: Link) -> None:
            self.links.append(link)
            on_link(link)

        return super().listen(me, bind, note)


class Early:
    """Hold a listener of beta, the links to it, and what its taker got, in order."""

    def __init__(self, tick_s: float = 3600) -> None:
        self.network = Noting()
        self.head, self.beta, self.other = make_local_members(["alpha", "beta", "gamma"])
        self.place = self.beta.member.address
        self.listener = EarlyListener(self.network, membership_of(self.beta), self.place, tick_s=tick_s)
        self.taken: list[Link] = []

    def dial(self, me: LocalMember) -> Link:
        """Return beta's end of a new link from ``me``."""
        self.network.dial(membership_of(me), self.beta.member, 30)
        return self.network.links[-1]

    def hand_over(self, take: OnLink | None = None) -> None:
        self.listener.listen(membership_of(self.beta), self.place, take or self.taken.append)


def test_ended_links_are_not_kept_while_a_peer_starts() -> None:
    early = Early()
    for _ in range(3):
        early.dial(early.head).close("surplus")
    first, second = early.dial(early.head), early.dial(early.head)
    early.hand_over()
    assert early.taken == [first, second]
    early.listener.close()


def test_a_link_that_comes_during_the_hand_over_comes_after_the_older_ones() -> None:
    early = Early()
    old = [early.dial(early.head), early.dial(early.other)]

    def take(link: Link) -> None:
        if not early.taken:
            early.dial(early.head)
        early.taken.append(link)

    early.hand_over(take)
    assert early.taken == [*old, early.network.links[-1]]
    early.listener.close()


def test_a_link_that_is_not_taken_ends_and_the_others_are_taken() -> None:
    early = Early()
    bad, good = early.dial(early.head), early.dial(early.other)

    def take(link: Link) -> None:
        if link is bad:
            raise LinkBroken("no")
        early.taken.append(link)

    early.hand_over(take)
    assert early.taken == [good]
    assert bad.is_over
    early.listener.close()


def test_after_an_error_of_the_taker_the_kept_links_end_with_the_listener() -> None:
    early = Early()
    links = [early.dial(early.head), early.dial(early.other)]

    def take(link: Link) -> None:
        raise RuntimeError("no thread can start")

    with pytest.raises(RuntimeError):
        early.hand_over(take)
    early.listener.close()
    assert all(link.is_over for link in links)


def test_a_head_that_reads_nothing_holds_up_only_its_own_links_and_gets_no_progress_after_the_taker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sends, may_end, taken = threading.Event(), threading.Event(), threading.Event()
    events: list[str] = []

    def stalled(_link: Link, _message: Message) -> None:
        sends.set()
        assert may_end.wait(30)
        events.append("progress sent")

    monkeypatch.setattr(Link, "send", stalled)
    early = Early(TICK_S)
    head = early.dial(early.head)
    assert sends.wait(30)
    other, again = early.dial(early.other), early.dial(early.head)

    def take(link: Link) -> None:
        early.taken.append(link)
        events.append(f"taken {link.peer}")
        if link is again:
            taken.set()

    early.hand_over(take)
    late = early.dial(early.other)
    assert early.taken == [other, late]
    may_end.set()
    assert taken.wait(30)
    assert early.taken == [other, late, head, again]
    assert events == ["taken gamma", "taken gamma", "progress sent", "taken alpha", "taken alpha"]
    early.listener.close()
