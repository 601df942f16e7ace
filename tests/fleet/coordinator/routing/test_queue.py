from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from comparisons.fleet.provider import SimulatedProvider, SimulatedWork
from convoy.errors import QueueFull
from convoy.fleet.capacity import Capacity
from convoy.fleet.coordinator.routing.dispatch import Dispatcher, QueueLimits
from convoy.fleet.coordinator.routing.queue import FairQueue
from convoy.fleet.coordinator.routing.route_request import RouteRequest
from convoy.trust.evidence.level import Level

SLOW = Capacity(slots=2, decode_rate=10, batch_rate=16, prefill_rate=100, max_context=4096)


def ask(
    number: int, account: str = "a", deadline_s: float = 1e9, tokens: int = 50, **changes: Any
) -> RouteRequest:
    return replace(RouteRequest(number, account, "m", 100, tokens, 0.0, deadline_s), **changes)


def test_however_many_wait_for_what_is_not_here_the_first_that_can_go_is_found_and_each_kind_asked_once() -> (
    None
):
    queue = FairQueue(1000, 1000)
    for number in range(100):
        queue.add(ask(number, level=Level.HARDWARE))
    queue.add(ask(100, prompt_tokens=5000))
    queue.add(ask(101, prompt_tokens=5000))
    queue.add(ask(102, prompt_tokens=50))
    asked: list[int] = []

    def place(one: RouteRequest) -> bool:
        asked.append(one.number)
        return one.level is not Level.HARDWARE and one.prompt_tokens < 4096

    found = queue.take(place)
    assert found is not None
    assert found.number == 102
    assert asked == [0, 100, 102]


def taken(queue: FairQueue) -> int | None:
    found = queue.take(lambda _: True)
    return None if found is None else found.number


def test_whoever_has_the_least_under_way_goes_first_and_within_an_account_the_oldest() -> None:
    queue = FairQueue(100, 100)
    queue.started(ask(0, "busy"))
    for number, account in enumerate(["busy", "idle", "idle", "other"], start=1):
        queue.add(ask(number, account))
    assert [taken(queue) for _ in range(4)] == [2, 4, 3, 1]
    assert taken(queue) is None


def test_an_account_is_not_passed_over_for_ever_by_accounts_that_come() -> None:
    queue = FairQueue(100, 100)
    running = ask(0, "waiting", tokens=4000)
    queue.started(running)
    queue.add(ask(1, "waiting"))
    for number in range(2, 30):  # each with nothing under way, and so before it
        queue.add(ask(number, f"new{number}"))
        assert taken(queue) == number
    queue.ended(running)
    for number in range(30, 40):
        queue.add(ask(number, f"new{number}"))
    assert taken(queue) == 1  # as soon as it has no more than they have, it is the one that waits longest


def test_what_keeps_the_oldest_waiting_keeps_neither_its_account_nor_others() -> None:
    queue = FairQueue(100, 100)
    queue.add(ask(0, level=Level.HARDWARE))
    queue.add(ask(1))
    queue.add(ask(2, "b", level=Level.HARDWARE))
    found = queue.take(lambda one: one.level is not Level.HARDWARE)
    assert found is not None
    assert found.number == 1
    found = queue.take(lambda one: one.account == "b")
    assert found is not None
    assert (found.number, len(queue)) == (2, 1)


def test_how_many_are_ahead_counts_turns_and_not_what_others_queue() -> None:
    queue = FairQueue(100, 100)
    for number in range(20):
        queue.add(ask(number, "greedy"))
    assert queue.ahead_of("modest") == 1
    queue.add(ask(20, "modest"))
    assert queue.ahead_of("modest") == 3
    assert queue.ahead_of("greedy") == 21


def test_who_left_or_is_late_is_in_the_queue_no_more() -> None:
    queue = FairQueue(3, 2)
    queue.add(ask(0, deadline_s=5.0))
    queue.add(ask(1, deadline_s=4.0))
    assert queue.is_full("a")
    assert not queue.is_full("b")
    assert queue.remove(1) is not None
    assert queue.remove(1) is None
    assert queue.next_deadline_s() == 5.0
    assert [one.number for one in queue.expired(5.0)] == [0]
    assert (len(queue), queue.next_deadline_s(), queue.waiting("a")) == (0, None, 0)


class Line:
    """Hold a dispatcher and one provider that takes as long as it said, from 0."""

    def __init__(self, limits: QueueLimits) -> None:
        self.dispatcher = Dispatcher(limits)
        self.dispatcher.join("p", {"m": SLOW}, Level.NONE, 0.0)
        self.provider = SimulatedProvider("p", SLOW)

    def submit(self, one: RouteRequest, now_s: float) -> None:
        if self.dispatcher.submit(one, now_s) is not None:
            self.provider.start(SimulatedWork(one, one.max_tokens, now_s), now_s)

    def run(self, until_s: float) -> None:
        while (now_s := self.provider.next_s()) is not None and now_s <= until_s:
            begun, over = self.provider.step(now_s)
            for work in begun:
                self.dispatcher.first_token(work.ask.number)
            for work in over:
                placed = self.dispatcher.finished(
                    work.ask.number,
                    now_s,
                    first_s=work.first_s - work.began_s,
                    output_tokens=work.output_tokens,
                    decode_s=now_s - work.first_s,
                )
                for one in placed:
                    self.provider.start(SimulatedWork(one.ask, one.ask.max_tokens, now_s), now_s)


@pytest.mark.parametrize("limits", [QueueLimits(4, 4), QueueLimits(1000, 1000)])
def test_who_comes_when_retry_after_says_is_let_in_and_who_comes_much_earlier_is_not(
    limits: QueueLimits,
) -> None:
    """The queue is full, or the deadline of 30 s could not be met."""
    line = Line(limits)
    line.submit(ask(0), 0.0)
    line.run(30.0)
    after_s, number = 0.0, 0
    while not after_s:
        number += 1
        try:
            line.submit(ask(number, deadline_s=60.0), 30.0)
        except QueueFull as error:
            after_s = error.retry_after_s or 0.0
    early_s, late_s = 30.0 + after_s * 0.2, 30.0 + after_s * 2.2  # two run in step, so they end together
    line.run(early_s)
    with pytest.raises(QueueFull):
        line.submit(ask(number, deadline_s=early_s + 30.0), early_s)
    line.run(late_s)
    line.submit(ask(number, deadline_s=late_s + 30.0), late_s)
