"""The member that is left out when the stages fail again and again although every member is connected."""

from __future__ import annotations

from convoy.cluster.recovery.fault import FaultTracker


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_member_that_fails_by_itself_is_named_from_the_third_time_on() -> None:
    tracker = FaultTracker()
    assert [tracker.note(["beta"]) for _ in range(4)] == [[], [], ["beta"], ["beta"]]


def test_of_two_that_may_have_been_it_the_accused_comes_first() -> None:
    tracker = FaultTracker()
    assert [tracker.note(["beta", "gamma"]) for _ in range(3)] == [[], [], ["beta", "gamma"]]


def test_who_accuses_one_member_after_another_is_the_likeliest() -> None:
    tracker = FaultTracker()
    for _ in range(3):
        tracker.note(["beta", "gamma"])
    assert tracker.note(["delta", "gamma"]) == ["gamma"]
    tracker.note(["delta", "gamma"])
    assert tracker.note(["delta", "gamma"]) == ["gamma", "delta"]


def test_a_failure_after_a_calm_minute_is_a_new_one() -> None:
    clock = Clock()
    tracker = FaultTracker(clock)
    tracker.note(["beta"])
    tracker.note(["beta"])
    clock.now_s = 50.0
    tracker.recovered()
    clock.now_s = 109.0
    assert tracker.note(["beta"]) == ["beta"]
    clock.now_s = 170.0
    assert tracker.note(["beta"]) == []


def test_each_wait_is_longer_until_something_else_happens() -> None:
    tracker = FaultTracker()
    waits_s = [tracker.wait_s() for _ in range(5)]
    assert waits_s[4] > waits_s[0]
    tracker.forget()
    assert tracker.wait_s() < waits_s[4]
