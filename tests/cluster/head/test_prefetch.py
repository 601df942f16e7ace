"""Preparations at a head: their order, and the members that each asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from convoy.cluster.head.prefetch import HeadPrefetch
from convoy.cluster.head.pull import WeightPull
from convoy.errors import Incompatible, LinkBroken
from convoy.model.checkpoints.source import ModelSource
from convoy.wire.messages.control import Plan, StageAssignment
from convoy.wire.messages.fetch import SUPERSEDED, Prepare, Prepared
from support.cluster import MEMBER
from support.waiting import wait_until


class Members:
    """Stand for the connected peers, and keep each PREPARE that is sent to them."""

    def __init__(self, *names: str) -> None:
        self.hello = None
        self.slow: Any = SimpleNamespace(names=set)
        self.sent: list[tuple[str, Prepare]] = []
        self.links: dict[str, Any] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self.links[name] = SimpleNamespace(peer=name, send=lambda said: self.sent.append((name, said)))

    def present(self) -> dict[str, tuple[Any, None]]:
        return {name: (link, None) for name, link in self.links.items()}

    def require(self, names: list[str]) -> dict[str, Any]:
        return {name: self.links[name] for name in names}

    def closed_within(self, _seconds: float) -> bool:
        return False

    def plan(self, plan_id: int) -> Plan:
        """Return a plan over all members."""
        holders = ["alpha", *self.links]
        stages = [StageAssignment(name, at, at + 1, at == 0, at == 0) for at, name in enumerate(holders)]
        return Plan(plan_id, "org/name", "0" * 64, stages, "plain-f32", "float32", 16, 64, "c" * 64)


def prefetch_of(members: Members, planner: Callable[[], Any] = SimpleNamespace) -> HeadPrefetch:
    peers: Any = members
    return HeadPrefetch("alpha", peers, planner, 60.0)


def fetch(prefetch: HeadPrefetch, make_plan: Callable[[], Plan]) -> threading.Thread:
    thread = threading.Thread(target=prefetch.fetch, args=(make_plan, lambda: None, lambda *_far: None))
    thread.start()
    return thread


def test_a_pull_is_planned_for_the_members_that_are_here_once_it_begins() -> None:
    members = Members("beta")
    prefetch = prefetch_of(members)
    first = fetch(prefetch, lambda: members.plan(1))
    wait_until(lambda: len(members.sent) == 1)
    second = fetch(prefetch, lambda: members.plan(2))
    members.add("gamma")
    prefetch.handle_prepared(members.links["beta"], Prepared(1, ""))
    wait_until(lambda: len(members.sent) == 3)
    assert {(name, said.plan.plan_id) for name, said in members.sent[1:] if said.plan is not None} == {
        ("beta", 2),
        ("gamma", 2),
    }
    for name in ("beta", "gamma"):
        prefetch.handle_prepared(members.links[name], Prepared(2, ""))
    first.join(30)
    second.join(30)


def test_a_newcomer_asks_once_more_after_a_pull_that_came_before_it() -> None:
    members, ids, joined = Members("beta"), iter((2, 3)), threading.Event()

    def again(*_: object) -> SimpleNamespace:
        return SimpleNamespace(plan=members.plan(next(ids)), members={"alpha", "beta"})

    prefetch = prefetch_of(members, lambda: SimpleNamespace(again=again))
    pull = fetch(prefetch, lambda: members.plan(1))
    wait_until(lambda: len(members.sent) == 1)
    prefetch.joined("beta", joined.set, joined.clear)
    wait_until(lambda: len(members.sent) == 2)
    link = members.links["beta"]
    prefetch.handle_prepared(link, Prepared(2, SUPERSEDED))
    wait_until(lambda: len(members.sent) == 3)
    prefetch.handle_prepared(link, Prepared(3, ""))
    assert joined.wait(30)
    prefetch.handle_prepared(link, Prepared(1, SUPERSEDED))
    pull.join(30)


def pull_of(members: Members, lost: Callable[[], None], error: Exception) -> WeightPull:
    """Return a pull that fails once, as ``error``, after ``lost``."""
    prefetch, errors = prefetch_of(members), [error]

    def fetch_once(make_plan: Callable[[], Plan], *_: object) -> dict[str, str]:
        make_plan()
        if errors:
            lost()
            raise errors.pop()
        return {}

    fake: Any = prefetch
    fake.fetch = fetch_once
    planner: Any = SimpleNamespace(first=lambda _hellos: SimpleNamespace(plan=members.plan(1)))
    return WeightPull(MEMBER, prefetch, lambda *_: planner, lambda _source: {})


def test_a_member_that_goes_before_it_is_asked_leaves_its_part_to_the_others() -> None:
    members = Members("beta", "gamma")
    pull = pull_of(members, members.links.clear, LinkBroken("the link to beta ended"))
    source = ModelSource.resolve("demo-mini")
    assert pull.run(source, lambda: None, lambda *_far: None) == set()


def test_another_error_of_a_member_ends_a_pull() -> None:
    members = Members("beta")
    pull = pull_of(members, lambda: None, Incompatible("beta differs"))
    with pytest.raises(Incompatible, match="beta differs"):
        pull.run(ModelSource.resolve("demo-mini"), lambda: None, lambda *_far: None)
