"""From no members to the first step: members that are lost meanwhile, and when missing ones are dialled."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from cluster.recovery.test_recovery import SOURCE, Scene, ask, scene, small, stages
from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.head.bring_up import begin
from convoy.cluster.head.head import Head
from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.errors import (
    ConfigError,
    ConvoyError,
    LinkBroken,
    LinkClosed,
    PeerError,
    PeerUnreachable,
    PlanError,
    StepError,
    TooLittleMemory,
)
from convoy.model.backends.host.stage import HostStage
from convoy.model.kernels.registry import own_form
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.span import Span
from convoy.trust.evidence.policy import OfferRule, Policy
from support.cluster import MEMBER, PeerThread
from support.link_parts import cut
from support.waiting import wait_until


def dies_once_while_it_loads(monkeypatch: pytest.MonkeyPatch, peers: dict[str, PeerThread]) -> None:
    """End once while it loads, as beta's machine does: its connections end without a word."""
    load, died = HostStage.load, list[str]()

    def load_or_die(source: object, mine: object, *args: object, **kept: object) -> HostStage:
        if mine.member == "beta" and not died:  # type: ignore[attr-defined]
            died.append("beta")
            head = peers["beta"].peer.head
            assert head is not None
            cut(head)
            raise StepError("this machine is gone")
        return load(source, mine, *args, **kept)  # type: ignore[arg-type]

    monkeypatch.setattr(HostStage, "load", load_or_die)


def test_a_peer_that_dies_while_it_loads_for_the_first_plan_is_planned_around(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        s.join("gamma")
        dies_once_while_it_loads(monkeypatch, s.peers)
        cluster = s.serve()
        assert "the cluster starts without beta" in caplog.text
        assert ask(cluster) == "17"
        wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])  # it is sought, and used


def test_a_peer_that_dies_while_it_loads_and_cannot_be_spared_ends_the_bring_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene("beta") as s:
        s.join("beta")
        dies_once_while_it_loads(monkeypatch, s.peers)
        with pytest.raises(LinkBroken, match="the link to beta ended"):
            s.serve(member=small())


def test_whoever_comes_before_anybody_listens_is_told_of_once_somebody_does() -> None:
    with scene("beta") as s:
        gone = s.join("beta")
        head = Head(s.me, SOURCE, HeadOptions(MEMBER, wait_s=60, num_blocks=32), s.network)
        s.stack.callback(head.close)
        head.bring_up()
        assert list(head.links) == ["beta"]
        head.links.clear()
        assert list(head.links) == ["beta"], "what was handed out is a copy"
        gone.stop()
        wait_until(lambda: not head.links)
        back, joined = s.join("beta"), list[str]()
        assert back.events.empty(), "nobody dials before the hooks are set"
        head.seek(lambda: None, joined.append)
        wait_until(lambda: joined == ["beta"])


def test_a_member_that_is_absent_is_done_without_and_used_when_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        cluster = s.serve(wait_s=1.0)
        assert "gamma at 127.0.0.1:7002 did not answer within 1 s; the cluster starts without" in caplog.text
        assert stages(cluster) == ["alpha", "beta"]
        assert ask(cluster) == "17"
        s.join("gamma")
        wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])


def test_a_head_that_can_hold_the_model_starts_alone_and_uses_who_comes_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scene("beta") as s:
        cluster = s.serve(wait_s=0)
        assert "beta at 127.0.0.1:7001 did not answer within 0 s; the cluster starts without" in caplog.text
        assert stages(cluster) == ["alpha"]
        assert ask(cluster) == "17"
        s.join("beta")
        wait_until(lambda: stages(cluster) == ["alpha", "beta"])
        assert ask(cluster) == "17"


def test_a_head_that_does_not_wait_uses_members_that_are_there() -> None:
    with scene("beta") as s:
        s.join("beta")
        assert stages(s.serve(wait_s=0)) == ["alpha", "beta"]


def tiny() -> MemberOptions:
    """Return options of a peer that holds no more than one layer."""
    needed = stage_bytes(SOURCE.spec, Span(1, 2), own_form("exact-f32"))
    return replace(MEMBER, memory_bytes=needed + 500_000)


class Starting:
    """Start a head on a thread of its own, because members that it needs are absent."""

    def __init__(self, s: Scene, **options: object) -> None:
        self._found: queue.SimpleQueue[RunningCluster | ConvoyError] = queue.SimpleQueue()
        self._wanted = threading.Event()
        self._wanted.set()
        s.stack.callback(self._wanted.clear)
        head = HeadOptions(**{"member": small(1), "wait_s": 0, "num_blocks": 32, **options})  # type: ignore[arg-type]
        self._head = replace(head, keep_waiting=True)
        self._s = s
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            cluster = RunningCluster.start(
                self._s.me, SOURCE, self._head, network=self._s.network, watch=self._watch
            )
        except ConvoyError as error:
            self._found.put(error)
            return
        self._found.put(cluster)

    def _watch(self) -> None:
        if not self._wanted.is_set():
            raise LinkClosed("nobody wants this head any more")

    def stop(self) -> None:
        self._wanted.clear()

    def cluster(self) -> RunningCluster:
        cluster = self._found.get(timeout=60)
        assert isinstance(cluster, RunningCluster), cluster
        self._s.stack.callback(cluster.close)
        return cluster

    def error(self) -> ConvoyError:
        error = self._found.get(timeout=60)
        assert isinstance(error, ConvoyError)
        return error


def test_a_head_that_cannot_hold_the_model_waits_on_and_says_for_which_members(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scene("beta", "gamma") as s:
        starting = Starting(s)
        wait_until(lambda: "waiting for beta, gamma: stage 0 on alpha needs" in caplog.text)
        gamma = PeerThread(s.members["gamma"], PeerOptions(tiny()), s.network)
        s.stack.callback(gamma.stop)
        wait_until(lambda: "waiting for beta: " in caplog.text)
        s.join("beta")
        cluster = starting.cluster()
        assert sorted(stages(cluster)) == ["alpha", "beta", "gamma"]
        assert ask(cluster) == "17"


def test_a_head_waits_on_for_a_member_that_its_spans_name() -> None:
    with scene("beta") as s:
        starting = Starting(s, member=MEMBER, spans={"alpha": "0:0,output", "beta": "1:3"})
        s.join("beta")
        assert stages(starting.cluster()) == ["alpha", "beta"]


def test_a_head_that_waits_on_can_be_ended(caplog: pytest.LogCaptureFixture) -> None:
    with scene("beta") as s:
        starting = Starting(s)
        wait_until(lambda: "waiting for beta: " in caplog.text)
        starting.stop()
        assert isinstance(starting.error(), LinkClosed)


def test_a_head_waits_on_for_a_member_that_dies_while_it_loads_and_cannot_be_spared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scene("beta") as s:
        s.join("beta")
        dies_once_while_it_loads(monkeypatch, s.peers)
        cluster = Starting(s, wait_s=60).cluster()
        assert stages(cluster) == ["alpha", "beta"]
        assert ask(cluster) == "17"


def test_a_head_waits_on_for_a_member_after_another_offers_less_than_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load, refused = HostStage.load, list[str]()

    def refuse_once(source: object, mine: object, *args: object, **kept: object) -> HostStage:
        if mine.member == "beta" and not refused:  # type: ignore[attr-defined]
            refused.append("beta")
            raise TooLittleMemory("it does not fit", room_bytes=tiny().memory_bytes)
        return load(source, mine, *args, **kept)  # type: ignore[arg-type]

    monkeypatch.setattr(HostStage, "load", refuse_once)
    with scene("beta", "gamma") as s:
        s.join("beta")
        starting = Starting(s, wait_s=1)
        wait_until(lambda: "waiting for gamma: " in caplog.text)
        s.join("gamma")
        assert sorted(stages(starting.cluster())) == ["alpha", "beta", "gamma"]
        assert refused == ["beta"]


def test_a_head_does_not_wait_for_members_that_would_not_be_enough() -> None:
    with scene("beta") as s:
        beta = PeerThread(s.members["beta"], PeerOptions(tiny()), s.network)
        s.stack.callback(beta.stop)
        error = Starting(s, wait_s=60).error()
        assert isinstance(error, PlanError)


@pytest.mark.parametrize(
    "options",
    [
        {"member": small(1)},
        {"spans": {"alpha": "0:0,output", "beta": "1:2", "gamma": "3:3"}},
    ],
)
def test_a_member_that_is_absent_and_needed_is_named_with_its_address(options: dict[str, object]) -> None:
    with scene("beta", "gamma") as s:
        s.peers["beta"] = beta = PeerThread(s.members["beta"], PeerOptions(small(1)), s.network)
        s.stack.callback(beta.stop)
        with pytest.raises(PeerUnreachable, match=r"gamma at 127\.0\.0\.1:7002 did not answer within 1 s"):
            s.serve(wait_s=1.0, **options)


def test_a_head_with_a_rule_for_an_unknown_member_does_not_start() -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        mistyped = replace(MEMBER, policy=Policy(offers=(OfferRule(10**9, ("betta",)),)))
        with pytest.raises(ConfigError, match=r"\[\[offer\]\] rule 1 names betta, which is no member"):
            s.serve(member=mistyped)
        absent = replace(MEMBER, policy=Policy(offers=(OfferRule(10**9, ("gamma",)),)))
        assert stages(s.serve(member=absent, wait_s=1.0)) == ["alpha", "beta"]


class Flapping:
    """Stand for the head's peers. Each link is another one after `flap`."""

    absent: ClassVar[dict[str, PeerUnreachable]] = {}
    num_changes = 0

    def __init__(self, *names: str) -> None:
        self.links = {name: (object(), None) for name in names}

    def flap(self, name: str) -> None:
        self.links[name] = (object(), None)

    def present(self) -> dict[str, tuple[object, None]]:
        return dict(self.links)

    def drop_kernel(self, *_: object) -> bool:
        return False


@pytest.mark.parametrize(("name", "num_loads"), [("beta", 4), ("gamma", 1)])
def test_a_plan_is_made_anew_a_few_times_for_its_own_member_that_came_back(name: str, num_loads: int) -> None:
    peers, loads = Flapping("beta", "gamma"), list[object]()
    proposal = SimpleNamespace(
        members={"alpha", "beta"}, placement=SimpleNamespace(mode="pipeline"), plan=SimpleNamespace(stages=())
    )
    planner = SimpleNamespace(first=lambda _: proposal, again=lambda *_: proposal)

    def install(one: object) -> ActivePlan:
        loads.append(one)
        peers.flap(name)
        raise PeerError("beta refuses the plan")

    with pytest.raises(PeerError, match="beta refuses"):
        begin(
            peers,  # type: ignore[arg-type]
            planner,  # type: ignore[arg-type]
            lambda: {"alpha": None, "beta": None},  # type: ignore[dict-item]
            install,
            replaceable=True,
            watch=None,
        )
    assert len(loads) == num_loads
