"""How long one is held to be slow that held everybody up, with a clock of the test's own."""

from __future__ import annotations

import math

from convoy.cluster.presence.backoff import FIRST_S, STAYED_S, Backoffs
from convoy.cluster.presence.slow_members import TRUSTED_AFTER_S, SlowMembers


class Clock:
    """Go on when a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_one_that_was_slow_is_like_the_others_a_minute_after_it_answers_again() -> None:
    clock = Clock()
    slow = SlowMembers(clock)
    slow.came("beta")
    slow.add("gamma")
    clock.now_s += 3600
    assert slow.names() == {"gamma"}
    assert slow.left_s("gamma") == math.inf
    slow.came("gamma")
    clock.now_s += TRUSTED_AFTER_S - 1
    assert slow.names() == {"gamma"}
    clock.now_s += 1
    assert slow.names() == set()
    assert slow.left_s("gamma") == slow.left_s("beta") == 0


def test_one_that_is_slow_again_has_to_wait_again() -> None:
    clock = Clock()
    slow = SlowMembers(clock)
    slow.add("gamma")
    slow.came("gamma")
    clock.now_s += TRUSTED_AFTER_S
    slow.add("gamma")
    assert slow.names() == {"gamma"}


def test_who_goes_as_soon_as_it_came_is_sought_as_one_that_did_not_come() -> None:
    clock = Clock()
    backoffs = Backoffs(clock)
    _, pause_s = backoffs.begin("beta")
    assert pause_s == 0
    pauses = []
    for _ in range(9):
        backoffs.came("beta")
        clock.now_s += 0.01
        pauses.append(backoffs.begin("beta")[1])
    assert pauses[0] <= FIRST_S
    assert pauses[-1] >= 2.5
    clock.now_s += 2 * STAYED_S
    assert backoffs.begin("beta")[1] == 0
