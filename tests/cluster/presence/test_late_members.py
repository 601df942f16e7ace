"""Members that are noticed for answering late, with a clock of the test's own."""

from __future__ import annotations

from cluster.presence.test_slow_members import Clock
from convoy.cluster.presence.slow_members import LateMembers


def test_who_answers_late_at_three_steps_within_a_minute_is_one() -> None:
    clock = Clock()
    late_members = LateMembers(clock)
    for step in range(2):
        assert late_members.note(step, {"beta": 0.9, "gamma": 0.001}) == "beta"
        clock.now_s += 2
    assert not late_members.is_one("beta")
    assert late_members.note(2, {"beta": 0.7, "gamma": 0.2}) == "beta"
    assert late_members.is_one("beta")
    assert not late_members.is_one("gamma")
    clock.now_s += 60
    assert not late_members.is_one("beta")


def test_several_looks_at_one_step_are_one() -> None:
    late_members = LateMembers(Clock())
    for _ in range(5):
        assert late_members.note(7, {"beta": 0.9}) == "beta"
    assert not late_members.is_one("beta")


def test_where_all_answer_late_it_is_nobody() -> None:
    late_members = LateMembers(Clock())
    for step in range(5):
        assert late_members.note(step, {"beta": 0.52, "gamma": 0.5, "delta": 0.51}) is None
    assert not late_members.is_one("beta")


def test_who_answers_at_once_is_none_however_late_the_steps_are() -> None:
    late_members = LateMembers(Clock())
    for step in range(5):
        assert late_members.note(step, {"beta": 0.03, "gamma": 0.001}) is None
    assert late_members.note(5, {}) is None
    assert not late_members.is_one("beta")


def test_who_was_given_up_counts_from_the_beginning() -> None:
    late_members = LateMembers(Clock())
    for step in range(3):
        late_members.note(step, {"beta": 0.9})
    late_members.forget("beta")
    late_members.note(3, {"beta": 0.9})
    assert not late_members.is_one("beta")
