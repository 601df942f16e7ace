"""A peer that is busy with a plan when the next one comes: the rest of the old one is not done any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from cluster.peer.test_peer import HEAD_OPTIONS, HELLO, Conversation
from convoy.cluster.active_plan import plan_digest
from convoy.cluster.head.head import Head
from convoy.cluster.options import PeerOptions
from convoy.cluster.peer.successor import SuccessorDial
from convoy.errors import StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.tensors import to_wire
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.wire.messages.control import Activate, Activated, Message, Plan, Ready, Refuse, Step
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of
from support.waiting import wait_until


class HangingNetwork(MemoryNetwork):
    """Let a dial to ``gamma`` wait until ``over``, as for an address that swallows everything."""

    def __init__(self) -> None:
        super().__init__()
        self.dialled, self.over = threading.Event(), threading.Event()
        self.late: list[Link] = []

    def dial(self, me: Membership, peer: Member, timeout_s: float) -> Link:
        if peer.name != "gamma":
            return super().dial(me, peer, timeout_s)
        self.dialled.set()
        assert self.over.wait(20)
        link = super().dial(me, peer, timeout_s)
        self.late.append(link)
        return link


class Talk:
    """Drive a head by hand beside one peer of a trio: beta."""

    def __init__(self, stack: ExitStack) -> None:
        self.members = make_local_members(["alpha", "beta", "gamma"])
        self.network = HangingNetwork()
        stack.callback(self.network.over.set)
        self.peer = PeerThread(self.members[1], PeerOptions(MEMBER), self.network)
        stack.callback(self.peer.stop)
        self.gamma: list[Link] = []
        gamma = self.members[2]
        self.network.listen(membership_of(gamma), gamma.member.address, self.gamma.append)
        source = ModelSource.resolve("demo-mini")
        # this is about rings, and no head has to find out whether ranks would be faster
        options = replace(HEAD_OPTIONS, parallel="pipeline")
        self._head = Head(membership_of(self.members[0]), source, options, self.network)
        self._link = Conversation(self.members[0], self.members[1], self.network)
        self.link = self._link.link
        self._link.ask(HELLO)

    def plan(self, *names: str) -> Plan:
        """Send one over these members."""
        plan = self._head.planner.first(dict.fromkeys(names, HELLO)).plan
        self.link.send(plan, plan_id=plan.plan_id)
        return plan

    def activate(self, plan: Plan) -> None:
        self.link.send(Activate(plan.plan_id, plan_digest(plan), [8]), plan_id=plan.plan_id)

    def hear(self, kind: type[Message]) -> Message:
        while not isinstance(heard := self._link.hear(), kind):
            assert not isinstance(heard, Exception), heard
        return heard


@pytest.fixture
def talk() -> Iterator[Talk]:
    with ExitStack() as stack:
        yield Talk(stack)


def test_queued_steps_of_a_plan_that_is_over_do_not_run_before_the_next_is_loaded(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    runs, go_on = threading.Event(), threading.Event()

    def slow(_stage: HostStage, step: Step, *, hidden: torch.Tensor, tokens: object) -> torch.Tensor:
        ran.append(step.number)
        runs.set()
        assert go_on.wait(20)
        return hidden

    monkeypatch.setattr(HostStage, "run", slow)
    monkeypatch.setattr(HostStage, "select", lambda _stage, _step, hidden: hidden)
    old = talk.plan("alpha", "beta")
    talk.hear(Ready)
    talk.activate(old)
    talk.hear(Activated)
    assert talk.peer.peer.loaded is not None
    hidden = torch.zeros(0, talk.peer.peer.loaded.stage.hidden_size)
    for number in range(4):
        talk.link.send(Step(number, [], [], [], b""), plan_id=old.plan_id, step=number)
        talk.link.send_tensor(to_wire(hidden), plan_id=old.plan_id, step=number, boundary=old.stages[1].start)
    assert runs.wait(20)
    new = talk.plan("alpha", "beta")
    wait_until(lambda: talk.peer.peer.clock.supersedes(old.plan_id))
    go_on.set()
    ready = talk.hear(Ready)
    assert isinstance(ready, Ready)
    assert ready.plan_id == new.plan_id
    assert ran == [0]


def test_a_dial_that_hangs_does_not_keep_the_next_plan(talk: Talk) -> None:
    old = talk.plan("alpha", "beta", "gamma")
    talk.hear(Ready)
    talk.activate(old)
    assert talk.network.dialled.wait(20)
    new = talk.plan("alpha", "beta")
    refused, ready = talk.hear(Refuse), talk.hear(Ready)
    assert isinstance(refused, Refuse)
    assert "gamma is not dialled any more: another plan is here" in refused.reason
    assert isinstance(ready, Ready)
    assert ready.plan_id == new.plan_id
    talk.network.over.set()  # and a link that comes after all has no owner
    wait_until(lambda: talk.network.late and talk.network.late[0].is_over)


def test_a_dial_that_hangs_does_not_keep_the_next_head(talk: Talk) -> None:
    old = talk.plan("alpha", "beta", "gamma")
    talk.hear(Ready)
    talk.activate(old)
    assert talk.network.dialled.wait(20)
    talk.link.close("the head is gone")
    assert "alpha closed the link" in talk.peer.wait_for("ended").text


def test_an_activation_of_a_plan_that_is_over_dials_nobody(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = talk.plan("alpha", "beta", "gamma")
    talk.hear(Ready)
    monkeypatch.setattr(talk.peer.peer.clock, "supersedes", lambda _plan_id: True)
    talk.activate(old)
    refused = talk.hear(Refuse)
    assert isinstance(refused, Refuse)
    assert "a newer plan came before this one was active" in refused.reason
    assert not talk.network.dialled.is_set()


def test_what_a_dial_raises_is_raised_to_who_waits() -> None:
    def fail() -> Link:
        raise StepError("no way")

    with pytest.raises(StepError, match="no way"):
        SuccessorDial(fail, "gamma").wait()
