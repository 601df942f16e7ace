"""A roster file that changes under a running member."""

from __future__ import annotations

import datetime
import queue
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.cluster.roster_watch import TRY_AGAIN_S, RosterWatch
from convoy.transport.membership import Membership
from convoy.trust.roster.roster import sign_roster
from support.members import OPERATOR, later, make_local_members, membership_of, shifted


@pytest.fixture
def me() -> Membership:
    return membership_of(make_local_members(["alpha", "beta", "gamma"])[0])


def put(path: Path, data: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    beside.replace(path)


def test_a_new_file_counts_without_a_restart(me: Membership, tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    path.write_bytes(me.signed)
    adopted = threading.Event()
    me.subscribe(lambda _roster: adopted.set())
    watch = RosterWatch(path, me)
    put(path, later(me.roster, without=["gamma"]))
    assert adopted.wait(20)
    assert [member.name for member in me.roster.members] == ["alpha", "beta"]
    watch.close()


def test_a_bad_file_is_said_once_and_the_next_good_one_counts(me: Membership, tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = RosterWatch(path, me, said.put)
    watch.close()  # from here on the test looks
    watch.look()  # no file at all
    put(path, b"no roster")
    for _ in range(3):
        watch.look()
    put(path, sign_roster(replace(me.roster, cluster_id="away", epoch=5), OPERATOR))
    watch.look()
    put(path, later(me.roster))
    watch.look()
    assert me.roster.epoch == 2
    assert said.get_nowait().endswith("was not adopted: the roster is unsigned")
    assert "a roster of away" in said.get_nowait()
    assert said.empty()


def test_an_older_file_is_refused_and_what_was_accepted_stays(me: Membership, tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    first = me.signed
    me.offer(later(me.roster, epoch=3), "beta")
    path.write_bytes(first)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    RosterWatch(path, me, said.put).close()
    assert "offers roster epoch 1, and this member accepted epoch 4" in said.get(timeout=60)
    assert me.roster.epoch == 4


def test_a_file_that_is_refused_for_now_is_tried_again_and_said_once(tmp_path: Path) -> None:
    now = [datetime.datetime.now(datetime.UTC)]
    now_s = [0.0]
    members = make_local_members(["alpha", "beta", "gamma"])
    me = membership_of(members[0], now=lambda: now[0])
    path = tmp_path / "roster.toml"
    said: list[str] = []
    watch = RosterWatch(path, me, said.append, clock=lambda: now_s[0])
    watch.close()  # from here on the test looks
    hour = datetime.timedelta(hours=1)
    without_gamma = replace(me.roster, epoch=2, members=me.roster.members[:2])
    put(path, sign_roster(shifted(without_gamma, hour), OPERATOR))  # this machine's clock is behind
    for _ in range(3):
        watch.look()
        now_s[0] += TRY_AGAIN_S
    assert me.roster.epoch == 1
    assert len(said) == 1
    assert "is not valid before" in said[0]
    now[0] += hour
    watch.look()
    assert [member.name for member in me.roster.members] == ["alpha", "beta"]
