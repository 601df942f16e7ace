"""When a step is late, with a clock that stands still unless told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest

from convoy.engine.run.deadline import StepClock
from convoy.wire.messages.control import Row, Step


@dataclass
class Hand:
    """Hold a clock that is moved by hand."""

    at_s: float = 100.0

    def __call__(self) -> float:
        return self.at_s


@pytest.fixture
def hand() -> Hand:
    return Hand()


def step(num_tokens: int = 1, start: int = 0) -> Step:
    return Step(0, [], [], [Row(0, start, num_tokens, 1)], b"")


def pass_steps(clock: StepClock, hand: Hand, took_s: float, count: int = 20, num_tokens: int = 1) -> None:
    for _ in range(count):
        clock.sent(step(num_tokens))
        hand.at_s += took_s
        clock.returned()


def test_what_was_never_measured_may_take_the_upper_bound(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    clock.sent(step())
    assert clock.allowed_s() == 60.0
    assert clock.due_s() == hand.at_s + 60.0


def test_a_step_that_came_back_while_somebody_asked_is_never_late(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 0.001)
    assert clock.allowed_s() == 60.0


def test_quick_steps_are_late_after_a_second(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 0.002)
    clock.sent(step())
    assert clock.allowed_s() == 1.0


def test_slow_steps_are_late_after_five_times_their_99th_percentile(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 1.0, count=98)
    pass_steps(clock, hand, 3.0, count=2)
    clock.sent(step())
    assert clock.allowed_s() == pytest.approx(15.0)


def test_one_slow_step_of_very_many_does_not_count(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 50.0, count=1)
    pass_steps(clock, hand, 1.0, count=199)
    clock.sent(step())
    assert clock.allowed_s() == pytest.approx(5.0)


def test_a_long_step_is_no_loss_because_short_ones_were_quick(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 0.1)
    clock.sent(step(num_tokens=512))
    assert clock.allowed_s() > 5 * 0.1 * 200


def test_a_long_step_is_judged_by_long_steps_once_they_were_seen(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 0.1)
    pass_steps(clock, hand, 2.0, num_tokens=512)
    clock.sent(step(num_tokens=512))
    assert clock.allowed_s() == pytest.approx(10.0)
    clock.returned()
    clock.sent(step())
    assert clock.allowed_s() == 1.0


def test_steps_in_flight_before_it_give_a_step_more_time(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 0.3)
    for _ in range(8):
        clock.sent(step())
    for _ in range(7):
        hand.at_s += 0.3
        clock.returned()
    assert clock.allowed_s() > 8 * 0.3 * 2


def test_times_of_a_warm_up_do_not_count(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 2.0)
    clock.forget()
    pass_steps(clock, hand, 0.1)
    clock.sent(step())
    assert clock.allowed_s() == 1.0


def test_the_same_tokens_far_into_a_sequence_are_a_larger_step(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 1.0, num_tokens=64)
    clock.sent(step(num_tokens=64, start=8192))
    assert clock.allowed_s() > 10.0


def test_a_step_that_was_looked_after_gets_as_long_again(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 0.001)
    clock.sent(step())
    hand.at_s += 1.0
    clock.extend()
    assert clock.due_s() >= hand.at_s + 1.0
    hand.at_s += 30.0  # the check itself took long
    clock.extend()
    assert clock.due_s() > hand.at_s


def test_steps_behind_a_member_that_holds_everybody_up_teach_the_clock_nothing(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 0.001, count=200)
    for _ in range(10):
        clock.sent(step())
        clock.sent(step())
        hand.at_s += 1.0
        clock.extend(usual=False)
        hand.at_s += 0.9
        clock.returned()
        clock.returned()
    clock.sent(step())
    assert clock.allowed_s() == 1.0


def test_new_stages_get_time_to_touch_their_memory_and_keep_what_was_learnt(hand: Hand) -> None:
    clock = StepClock(60.0, hand)
    pass_steps(clock, hand, 0.001)
    clock.sent(step())
    clock.settle()
    clock.sent(step())
    assert clock.allowed_s() == 10.0
    clock.returned()
    pass_steps(clock, hand, 0.001, count=4)
    clock.sent(step())
    assert clock.allowed_s() == 1.0


def test_another_thread_may_ask_while_a_new_size_of_step_comes_back(hand: Hand) -> None:
    """A dictionary that grows while it is gone through would end the thread that ends links which hang."""
    seen: dict[int, deque[float]] = {}
    clock = StepClock(60.0, hand, seen=seen)
    pass_steps(clock, hand, 0.002, count=2)

    class Meddling(int):
        """Add another size while this one is compared."""

        def __lt__(self, other: int) -> bool:
            seen[100 + len(seen)] = seen[1]
            return int(self) < other

    seen[Meddling(7)] = seen[1]
    clock.sent(step())
    assert clock.allowed_s() == 1.0
