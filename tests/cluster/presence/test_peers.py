"""The members that the head dials, and how often."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from convoy.cluster.head.head import Head
from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.presence.peers import Peers
from convoy.cluster.recovery.recovery import StageRecovery
from convoy.config.kernels import MLX_BF16
from convoy.errors import ConvoyError, PlanError, StageLost
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.transport.member import LocalMember, Member
from convoy.transport.membership import Membership
from convoy.trust.evidence.policy import OfferRule, Policy
from convoy.wire.messages.control import MAX_OFFER_BYTES, FrameType, Hello
from convoy.wire.messages.evidence import Challenge, Evidence
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of
from support.waiting import wait_until

HELLO = Hello("test", ["float32"], ["plain-f32"], 1 << 30, 1, "test")


def peers_of(
    me: LocalMember, network: MemoryNetwork, joined: threading.Event, options: MemberOptions = MEMBER
) -> Peers:
    """Make peers. ``joined`` is set whenever a member came."""

    def receive(link: Link, received: Received) -> None:
        message = received.message if isinstance(received, ReceivedMessage) else None
        if isinstance(message, Challenge):
            peers.verifier.attestation.handle_challenge(link, message)
        elif isinstance(message, Evidence):
            peers.verifier.attestation.handle_evidence(link, message)
        else:
            peers.after_greeting(lambda *_: None)(link, received)

    peers = Peers(
        membership_of(me),
        network,
        HeadOptions(options),
        receive=receive,
        lost=lambda *_: None,
        joined=lambda _name: joined.set(),
    )
    return peers


def test_of_a_peers_memory_as_much_counts_as_the_policy_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alpha, beta = make_local_members(("alpha", "beta"))
    network, joined = MemoryNetwork(), threading.Event()
    claim = Hello("test", ["float32"], ["plain-f32"], MAX_OFFER_BYTES, 1, "test")

    def greet(link: Link) -> None:
        link.start(lambda *_: None, lambda *_: None, frozenset({FrameType.HELLO, FrameType.CHALLENGE}))
        link.send(claim)

    policy = Policy(offers=(OfferRule(10**9 // 2),))
    network.listen(membership_of(beta), beta.member.address, greet)
    peers = peers_of(alpha, network, joined, replace(MEMBER, policy=policy, memory_bytes=1 << 30))
    monkeypatch.setattr(peers.verifier, "admit", lambda *_: None)  # and no member is asked for evidence
    peers.seek()
    assert joined.wait(30)
    assert peers.hellos["beta"].memory_bytes == 10**9 // 2
    assert peers.hello.memory_bytes == 1 << 30, "the head's own is its owner's choice"
    peers.close("done")
    assert "beta offers 17592.2 GB of memory, and the policy lets 0.5 GB count" in caplog.text


def test_another_model_may_take_the_kernels_of_mlx_that_the_last_one_barred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alpha, beta = make_local_members(("alpha", "beta"))
    network, joined = MemoryNetwork(), threading.Event()
    mac = Hello("test", ["float32"], [MLX_BF16, "exact-f32", "plain-f32"], 1 << 30, 1, "test", device="mlx")

    def greet(link: Link) -> None:
        link.start(lambda *_: None, lambda *_: None, frozenset({FrameType.HELLO, FrameType.CHALLENGE}))
        link.send(mac)

    network.listen(membership_of(beta), beta.member.address, greet)
    peers = peers_of(alpha, network, joined)
    monkeypatch.setattr(peers.verifier, "admit", lambda *_: None)  # and no member is asked for evidence
    peers.seek()
    assert joined.wait(30)
    assert peers.drop_kernel("beta", "plain-f32", "it failed here")
    assert peers.lower_offer("beta", 1 << 29)
    peers.judge_mlx("MLX does not run it")
    assert (peers.hellos["beta"].kernels, peers.hellos["beta"].device) == (["exact-f32"], "cpu")
    peers.judge_mlx("")
    assert (peers.hellos["beta"].kernels, peers.hellos["beta"].device) == ([MLX_BF16, "exact-f32"], "mlx")
    assert peers.hellos["beta"].memory_bytes == 1 << 29
    peers.close("done")


def test_a_member_is_missing_since_its_link_broke_before_the_loss_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alpha, beta = make_local_members(("alpha", "beta"))
    network, joined, noted = MemoryNetwork(), threading.Event(), threading.Event()
    links: list[Link] = []

    def greet(link: Link) -> None:
        links.append(link)
        link.start(lambda *_: None, lambda *_: None, frozenset({FrameType.HELLO, FrameType.CHALLENGE}))
        link.send(HELLO)

    def lost(_link: Link, error: ConvoyError) -> ConvoyError:
        assert noted.wait(30)
        return error

    network.listen(membership_of(beta), beta.member.address, greet)
    peers = peers_of(alpha, network, joined)
    monkeypatch.setattr(peers.verifier, "admit", lambda *_: None)  # and no member is asked for evidence
    monkeypatch.setattr(peers.verifier, "lost", lost)
    peers.seek()
    # At the second loss there is a time of the first one, too.
    for number in range(2):
        assert joined.wait(30)
        joined.clear()
        began_unix_s = time.time()
        links[number].dismiss("never mind", revoke=True)
        wait_until(lambda: peers.missing() == ["beta"])
        (absent,) = peers.absent_status()
        assert absent.since_unix_s is not None
        assert absent.since_unix_s >= began_unix_s
        noted.set()
        wait_until(joined.is_set)
        noted.clear()
    noted.set()
    peers.close("done")


def test_a_member_that_lowers_its_offer_again_and_again_is_not_planned_for_without_end() -> None:
    alpha, _ = make_local_members(("alpha", "beta"))
    peers = peers_of(alpha, MemoryNetwork(), threading.Event(), replace(MEMBER, memory_bytes=1 << 30))
    assert not peers.lower_offer("alpha", 1 << 30), "it offers as much"
    assert not peers.lower_offer("beta", 1), "it is not here"
    assert [peers.lower_offer("alpha", most) for most in (400, 300, 200, 100)] == [True, True, True, False]
    assert peers.hello.memory_bytes == 200
    peers.close("done")


def test_a_member_that_greets_and_goes_at_once_is_not_dialled_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alpha, beta = make_local_members(("alpha", "beta"))
    network = MemoryNetwork()
    links: list[Link] = []
    twice = threading.Event()

    def greet_and_go(link: Link) -> None:
        links.append(link)
        if len(links) > 1:
            twice.set()
        link.start(lambda *_: None, lambda *_: None, frozenset({FrameType.HELLO, FrameType.CHALLENGE}))
        with contextlib.suppress(ConvoyError):  # the head is closed meanwhile
            link.send(HELLO)
        company_has.wait(10)
        company_has.clear()
        link.dismiss("never mind", revoke=True)

    company_has = threading.Event()
    network.listen(membership_of(beta), beta.member.address, lambda link: _on_thread(greet_and_go, link))
    peers = peers_of(alpha, network, company_has)
    monkeypatch.setattr(peers.verifier, "admit", lambda *_: None)  # and no member is asked for evidence
    peers.seek()
    assert twice.wait(20)
    threading.Event().wait(1.0)  # the time in which it would dial a hundred times
    num_dials = len(links)
    peers.close("done")
    assert num_dials <= 10


def _on_thread(run: object, link: Link) -> None:
    threading.Thread(target=run, args=(link,), daemon=True).start()  # type: ignore[arg-type]


class ShortOfThreads(MemoryNetwork):
    """Fail the first dial as a machine without a free thread does."""

    num_dials = 0

    def dial(self, me: Membership, peer: Member, timeout_s: float) -> Link:
        self.num_dials += 1
        if self.num_dials == 1:
            raise RuntimeError("can't start new thread")
        return super().dial(me, peer, timeout_s)


@pytest.mark.parametrize("at_the_dial", [True, False])
def test_a_member_is_sought_on_after_an_error_that_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, at_the_dial: bool
) -> None:
    alpha, beta = make_local_members(("alpha", "beta"))
    network = ShortOfThreads() if at_the_dial else MemoryNetwork()
    peer = PeerThread(beta, PeerOptions(MEMBER), network)
    joined = threading.Event()
    peers = peers_of(alpha, network, joined)
    try:
        if at_the_dial:
            peers.seek()
        else:
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", _no_thread)
                peers.seek()
            peers.wait(peers.num_changes, 0.01)  # a thread that waits for a member looks again
        assert joined.wait(20)
    finally:
        peers.close("done")
        peer.stop()


def _no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_recovery_is_paced_and_bounded_however_often_members_come_and_go() -> None:
    tries: list[float] = []

    def again(*_: object) -> object:
        tries.append(time.monotonic())
        raise PlanError("nobody can hold it")

    peers = SimpleNamespace(
        num_changes=0, wait=lambda *_: True, present=dict, slow=SimpleNamespace(names=set[str])
    )
    head = SimpleNamespace(
        name="alpha",
        failed=None,
        peers=peers,
        hellos=dict,
        planner=SimpleNamespace(again=again),
        active_plan=SimpleNamespace(members={"alpha", "beta"}, placement=None),
        route=lambda: SimpleNamespace(missing="layers 2-3"),
    )
    recovery = StageRecovery(cast(Head, head), 0.3, 600.0, lambda _granted: cast(Any, None))
    with pytest.raises(StageLost, match=r"nobody took over within 0\.3 s"):
        recovery.find_stages(None, time.monotonic())
    assert tries[-1] - tries[0] < 2.0
    assert len(tries) <= 17
