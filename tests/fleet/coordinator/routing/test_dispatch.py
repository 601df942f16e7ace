from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.errors import NotReady, ProviderError, QueueFull
from convoy.fleet.capacity import Capacity, Load
from convoy.fleet.coordinator.routing.dispatch import Assignment, Dispatcher, QueueLimits
from convoy.fleet.coordinator.routing.route_request import Owner, RouteRequest, Trusted
from convoy.trust.evidence.level import Level
from support.examples import examples

SLOW = Capacity(slots=2, decode_rate=10, batch_rate=16, prefill_rate=100, max_context=4096)
FAST = Capacity(slots=4, decode_rate=100, batch_rate=300, prefill_rate=5000, max_context=4096)


def ask(number: int, account: str = "a", **changes: object) -> RouteRequest:
    made = RouteRequest(number, account, "m", 100, 50, 0.0, 60.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def fleet(limits: QueueLimits | None = None, **providers: Capacity) -> Dispatcher:
    dispatcher = Dispatcher(limits)
    for name, capacity in providers.items():
        dispatcher.join(name, {"m": capacity}, Level.NONE, 0.0)
    return dispatcher


def provider_of(assignment: Assignment | None) -> str | None:
    return None if assignment is None else assignment.provider


def test_a_request_goes_where_it_would_be_finished_first() -> None:
    dispatcher = fleet(slow=SLOW, fast=FAST)
    assert provider_of(dispatcher.submit(ask(0), 0.0)) == "fast"


def test_a_busy_fast_provider_still_wins_until_it_would_be_slower() -> None:
    dispatcher = fleet(slow=SLOW, fast=replace(FAST, slots=64, batch_rate=100))
    went = [provider_of(dispatcher.submit(ask(number), 0.0)) for number in range(40)]
    assert went[0] == "fast"
    assert "slow" in went  # 100 tokens a second shared by enough streams are slower than 10 alone


def test_nothing_is_refused_while_a_slot_is_free() -> None:
    dispatcher = fleet(QueueLimits(max_waiting=0, max_per_account=0), slow=SLOW, fast=FAST)
    went = [dispatcher.submit(ask(number), 0.0) for number in range(6)]
    assert all(went)
    with pytest.raises(QueueFull):
        dispatcher.submit(ask(6), 0.0)


def test_capacity_is_what_the_provider_says_and_no_constant() -> None:
    dispatcher = fleet(big=replace(FAST, slots=37))
    assert all(dispatcher.submit(ask(number), 0.0) for number in range(37))
    assert dispatcher.submit(ask(37), 0.0) is None


def test_what_a_provider_runs_for_others_takes_its_slots() -> None:
    dispatcher = fleet(fast=FAST)
    dispatcher.note_load("fast", {"m": Load(1, 0, 0, 0.0)}, 0.0)
    assert dispatcher.submit(ask(0), 0.0)
    assert dispatcher.submit(ask(1), 0.0) is None
    placed = dispatcher.note_load("fast", {"m": Load(2, 0, 0, 0.0)}, 1.0)
    assert [one.ask.number for one in placed] == [1]


def test_the_next_in_the_queue_follows_as_soon_as_one_ends() -> None:
    dispatcher = fleet(only=replace(SLOW, slots=1))
    dispatcher.submit(ask(0), 0.0)
    assert dispatcher.submit(ask(1), 0.0) is None
    dispatcher.first_token(0)
    placed = dispatcher.finished(0, 1.0, first_s=0.5, output_tokens=5, decode_s=0.5)
    assert [one.ask.number for one in placed] == [1]


def test_accounts_take_turns_however_many_one_of_them_asks() -> None:
    dispatcher = fleet(only=replace(SLOW, slots=1))
    dispatcher.submit(ask(0, "greedy"), 0.0)
    for number in range(1, 20):
        dispatcher.submit(ask(number, "greedy", deadline_s=math.inf), 0.0)
    dispatcher.submit(ask(20, "modest"), 0.0)  # what others queue takes nothing from its deadline
    dispatcher.submit(ask(21, "modest"), 0.0)
    order, running = [], 0
    for _ in range(4):
        (placed,) = dispatcher.finished(running, 1.0, first_s=1, output_tokens=2, decode_s=1)
        order.append(placed.ask.account)
        running = placed.ask.number
    assert sorted(order) == ["greedy", "greedy", "modest", "modest"]


def test_a_full_queue_says_when_to_come_again() -> None:
    dispatcher = fleet(QueueLimits(max_waiting=4, max_per_account=4), only=SLOW)
    for number in range(6):
        dispatcher.submit(ask(number, deadline_s=math.inf), 0.0)
    with pytest.raises(QueueFull, match="4 requests of this account wait for m, and at most 4 may") as caught:
        dispatcher.submit(ask(6, deadline_s=math.inf), 0.0)
    # two streams of 8 tokens a second, 50 tokens and a prompt of 100 each: one ends every 3.6 s
    assert caught.value.retry_after_s == pytest.approx(3.6, rel=0.1)


def test_one_account_cannot_fill_the_queue_for_all() -> None:
    dispatcher = fleet(QueueLimits(max_waiting=10, max_per_account=3), only=replace(SLOW, slots=1))
    for number in range(4):
        dispatcher.submit(ask(number, "greedy", deadline_s=math.inf), 0.0)
    with pytest.raises(QueueFull, match="3 requests of this account"):
        dispatcher.submit(ask(4, "greedy", deadline_s=math.inf), 0.0)
    assert dispatcher.submit(ask(5, "modest", deadline_s=math.inf), 0.0) is None
    assert dispatcher.waiting_of("greedy") == {"m": 3}
    assert dispatcher.waiting_of("modest") == {"m": 1}
    assert (dispatcher.running_of("greedy"), dispatcher.running_of("modest")) == (1, 0)


def test_an_account_is_not_told_how_many_requests_of_others_fill_the_queue() -> None:
    dispatcher = fleet(QueueLimits(max_waiting=3, max_per_account=3), only=replace(SLOW, slots=1))
    for number in range(4):
        dispatcher.submit(ask(number, "greedy", deadline_s=math.inf), 0.0)
    with pytest.raises(QueueFull, match="the queue for m is full: at most 3 requests may wait"):
        dispatcher.submit(ask(4, "modest", deadline_s=math.inf), 0.0)


def test_a_deadline_that_cannot_be_met_is_said_at_once() -> None:
    dispatcher = fleet(only=replace(SLOW, slots=1, batch_rate=10))
    dispatcher.submit(ask(9), 0.0)
    dispatcher.finished(9, 0.0, first_s=1.0, output_tokens=50, decode_s=4.9)
    dispatcher.submit(ask(0, deadline_s=8.0), 0.0)
    assert dispatcher.submit(ask(1, deadline_s=8.0), 0.0) is None
    with pytest.raises(QueueFull, match="may wait 8 s") as caught:
        dispatcher.submit(ask(2, deadline_s=8.0), 0.0)
    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 12


def test_before_anything_was_answered_a_guess_of_the_wait_refuses_nobody() -> None:
    dispatcher = fleet(only=replace(SLOW, slots=1))
    dispatcher.submit(ask(0, deadline_s=8.0), 0.0)
    waits = [
        dispatcher.submit(ask(number, prompt_tokens=2500, deadline_s=8.0), 0.0) for number in range(1, 9)
    ]
    assert waits == [None] * 8


def test_whose_deadline_is_over_leaves_the_queue() -> None:
    dispatcher = fleet(only=replace(SLOW, slots=1))
    dispatcher.submit(ask(0), 0.0)
    dispatcher.submit(ask(1, deadline_s=30.0), 0.0)
    assert dispatcher.next_tick_s(0.0) == 30.0
    assert dispatcher.tick(29.9) == ([], [])
    expired, placed = dispatcher.tick(30.0)
    assert [one.number for one in expired] == [1]
    assert not placed
    assert dispatcher.waiting("m") == 0


def test_without_any_provider_a_request_waits_for_one_to_come_back() -> None:
    dispatcher = Dispatcher()
    assert dispatcher.submit(ask(0), 0.0) is None
    placed = dispatcher.join("late", {"m": FAST}, Level.NONE, 5.0)
    assert [(one.ask.number, one.provider) for one in placed] == [(0, "late")]


def test_a_level_that_nobody_here_has_is_refused_with_both() -> None:
    dispatcher = fleet(only=FAST)
    with pytest.raises(NotReady, match="level hardware, 100 tokens"):
        dispatcher.submit(ask(0, level=Level.HARDWARE), 0.0)
    dispatcher.join("proved", {"m": SLOW}, Level.HARDWARE, 0.0)
    assert provider_of(dispatcher.submit(ask(1, level=Level.HARDWARE), 0.0)) == "proved"


def test_a_level_that_changes_decides_from_then_on_and_what_waits_for_it_goes() -> None:
    dispatcher = fleet(one=replace(FAST, slots=1), two=replace(SLOW, slots=1))
    assert dispatcher.set_level("one", Level.HARDWARE, 0.0) == []
    assert provider_of(dispatcher.submit(ask(0, level=Level.HARDWARE), 0.0)) == "one"
    assert dispatcher.submit(ask(1, level=Level.HARDWARE), 0.0) is None
    (placed,) = dispatcher.set_level("two", Level.HARDWARE, 1.0)
    assert (placed.ask.number, placed.provider) == (1, "two")
    dispatcher.set_level("one", Level.NONE, 2.0)
    dispatcher.set_level("two", Level.SELF_SIGNED, 2.0)
    with pytest.raises(NotReady):
        dispatcher.submit(ask(2, level=Level.HARDWARE), 2.0)


def test_a_prompt_that_seems_too_long_goes_to_the_longest_context_whose_engine_counts() -> None:
    dispatcher = fleet(short=replace(FAST, slots=9), long=replace(SLOW, max_context=8192))
    assert provider_of(dispatcher.submit(ask(0, prompt_tokens=5000), 0.0)) == "long"
    went = [dispatcher.submit(ask(number, prompt_tokens=10_000), 0.0) for number in (1, 2)]
    assert [provider_of(one) for one in went] == ["long", None]  # and it waits for that one
    assert provider_of(dispatcher.submit(ask(3, prompt_tokens=4000), 0.0)) == "short"


def test_what_a_provider_failed_goes_to_another_before_all_that_wait() -> None:
    dispatcher = fleet(fast=replace(FAST, slots=1), slow=replace(SLOW, slots=1))
    dispatcher.submit(ask(0), 0.0)
    dispatcher.submit(ask(1), 0.0)
    dispatcher.submit(ask(2), 0.0)
    failed, placed = dispatcher.failed(0, 1.0)
    assert failed is not None
    assert not placed  # the only free one just failed
    assert dispatcher.again(failed, 1.0) is None
    (placed_next,) = dispatcher.finished(1, 1.1, first_s=1, output_tokens=2, decode_s=0.1)
    assert (placed_next.ask.number, placed_next.provider) == (0, "slow")


def test_a_provider_that_refuses_everything_is_not_taken_for_an_idle_one() -> None:
    dispatcher = fleet(bad=replace(FAST, slots=100), good=replace(SLOW, slots=8))
    refusals, now_s = 0, 0.0
    for number in range(200):
        now_s += 0.1
        dispatcher.note_load("bad", {"m": Load(100, 0, 0, 0.0)}, now_s)
        assignment = dispatcher.submit(ask(number), now_s)
        while assignment is not None and assignment.provider == "bad":
            refusals += 1
            failed, _ = dispatcher.failed(number, now_s)
            assert failed is not None
            assignment = dispatcher.again(failed, now_s)
        dispatcher.first_token(number)
        dispatcher.finished(number, now_s, first_s=0.05, output_tokens=2, decode_s=0.05)
    assert refusals <= 8  # of 200; theirs took 9,000 in half an hour


def test_a_provider_that_failed_is_tried_again_with_one_request_and_then_with_all() -> None:
    dispatcher = fleet(only=FAST)
    dispatcher.submit(ask(0), 0.0)
    failed, _ = dispatcher.failed(0, 0.0)
    assert failed is not None
    dispatcher.again(failed, 0.0)
    dispatcher.submit(ask(1), 0.0)
    reopens_s = dispatcher.next_tick_s(0.0)
    assert reopens_s == 0.25
    _, placed = dispatcher.tick(reopens_s)
    assert [one.ask.number for one in placed] == [0]
    placed = dispatcher.finished(0, 1.0, first_s=0.1, output_tokens=2, decode_s=0.1)
    assert [one.ask.number for one in placed] == [1]


def test_a_provider_that_leaves_gives_back_what_it_ran() -> None:
    dispatcher = fleet(fast=FAST)
    dispatcher.submit(ask(0), 0.0)
    assert [one.number for one in dispatcher.leave("fast")] == [0]
    assert dispatcher.models() == []
    assert dispatcher.finished(0, 1.0, first_s=1, output_tokens=1, decode_s=1) == []


def test_a_draining_provider_gets_nothing_new() -> None:
    dispatcher = fleet(fast=FAST, slow=SLOW)
    dispatcher.drain("fast")
    assert provider_of(dispatcher.submit(ask(0), 0.0)) == "slow"


def test_where_the_only_provider_drains_a_request_waits_as_where_there_is_none() -> None:
    dispatcher = fleet(only=FAST)
    dispatcher.submit(ask(0), 0.0)
    dispatcher.finished(0, 1.0, first_s=1, output_tokens=2, decode_s=1)  # and from here on waits are known
    dispatcher.drain("only")
    assert dispatcher.submit(ask(1), 1.0) is None
    assert dispatcher.wait_s(ask(1)) == 3600  # a number, for Retry-After
    dispatcher.leave("only")
    placed = dispatcher.join("only", {"m": FAST}, Level.NONE, 2.0)
    assert [one.ask.number for one in placed] == [1]


def test_who_failed_a_request_is_tried_again_once_the_other_that_could_have_is_gone() -> None:
    dispatcher = fleet(one=replace(FAST, slots=1), two=replace(SLOW, slots=1))
    dispatcher.submit(ask(0), 0.0)
    dispatcher.submit(ask(1), 0.0)
    failed, _ = dispatcher.failed(0, 0.0)
    assert failed is not None
    assert dispatcher.again(failed, 0.0) is None  # for two, which is busy
    dispatcher.leave("two")
    _, placed = dispatcher.tick(1.0)
    assert [(one.ask.number, one.provider) for one in placed] == [(0, "one")]


def test_names_of_models_that_nobody_serves_or_wants_any_more_are_forgotten() -> None:
    dispatcher = Dispatcher()
    for number in range(5):
        dispatcher.join("p", {f"m{number}": FAST}, Level.NONE, 0.0)
        dispatcher.submit(ask(number, model=f"m{number}"), 0.0)
        dispatcher.leave("p")
    dispatcher.submit(ask(9, model="waited for", deadline_s=9.0), 0.0)
    dispatcher.tick(1.0)
    assert dispatcher.providers("m0") is None
    assert dispatcher.providers("waited for") is not None
    dispatcher.tick(9.0)
    assert dispatcher.providers("waited for") is None


def test_who_hangs_up_makes_room_at_once() -> None:
    dispatcher = fleet(only=replace(SLOW, slots=1))
    dispatcher.submit(ask(0), 0.0)
    dispatcher.submit(ask(1), 0.0)
    dispatcher.submit(ask(2), 0.0)
    assert dispatcher.abandon(1, 0.5) == []
    assert [one.ask.number for one in dispatcher.abandon(0, 0.5)] == [2]


def test_a_prompt_goes_to_whoever_read_its_beginning_before() -> None:
    dispatcher = fleet(one=SLOW, two=SLOW)
    first = dispatcher.submit(ask(0, tag=b"t", prompt_tokens=2000), 0.0)
    assert first is not None
    dispatcher.first_token(0)
    dispatcher.finished(0, 30.0, first_s=20, output_tokens=50, decode_s=5)
    for number in (1, 2, 3):
        again = dispatcher.submit(ask(number, tag=b"t", prompt_tokens=2000), 30.0)
        assert provider_of(again) == first.provider
        dispatcher.first_token(number)
        dispatcher.finished(number, 31.0, first_s=1, output_tokens=50, decode_s=5)


def test_whom_a_proxy_trusts_gets_its_requests_and_who_comes_later_too() -> None:
    dispatcher = Dispatcher()
    only = Trusted(frozenset({b"a" * 32}), frozenset({b"o" * 32}))
    keys = {"stranger": Owner(b"s" * 32), "ann": Owner(b"a" * 32)}
    for name, owner in keys.items():
        capacity = replace(FAST if name == "stranger" else SLOW, slots=1)
        dispatcher.join(name, {"m": capacity}, Level.NONE, 0.0, owner=owner)
    assert provider_of(dispatcher.submit(ask(0, trusted=only), 0.0)) == "ann"
    assert dispatcher.submit(ask(1, trusted=only), 0.0) is None  # it waits, and the stranger is free
    assert provider_of(dispatcher.submit(ask(2), 0.0)) == "stranger"
    certified = Owner(b"c" * 32, operator=b"o" * 32)
    (placed,) = dispatcher.join("certified", {"m": SLOW}, Level.NONE, 1.0, owner=certified)
    assert (placed.ask.number, placed.provider) == (1, "certified")
    dispatcher.leave("ann")
    dispatcher.leave("certified")
    dispatcher.finished(2, 2.0, first_s=1, output_tokens=2, decode_s=1)
    # No trusted provider is here: the client judges the one that it is given, and tells why not.
    assert provider_of(dispatcher.submit(ask(3, trusted=only), 2.0)) == "stranger"


def test_measured_rates_correct_what_a_provider_boasts() -> None:
    boaster = replace(FAST, slots=8)
    dispatcher = fleet(boaster=boaster, honest=replace(SLOW, slots=8))
    went = []
    for number in range(30):
        one = dispatcher.submit(ask(number), float(number))
        assert one is not None
        went.append(one.provider)
        dispatcher.first_token(number)
        # the boaster takes fifty times what it says, the other what it says
        took = (1.0, 24.5) if one.provider == "boaster" else (1.0, 4.9)
        dispatcher.finished(number, number + 1.0, first_s=took[0], output_tokens=50, decode_s=took[1])
    assert went[0] == "boaster"
    assert went[-1] == "honest"


@pytest.mark.parametrize(
    "capacity",
    [
        replace(FAST, slots=0),
        replace(FAST, slots=10**6),
        replace(FAST, decode_rate=0.0),
        replace(FAST, decode_rate=1e-320),
        replace(FAST, prefill_rate=1e10),
        replace(FAST, prefill_rate=math.nan),
        replace(FAST, batch_rate=math.inf),
        replace(FAST, max_context=0),
    ],
)
def test_an_offer_that_cannot_be_is_refused(capacity: Capacity) -> None:
    with pytest.raises(ProviderError):
        fleet(bad=capacity)


@pytest.mark.parametrize("load", [Load(-1, 0, 0, 0), Load(0, -1, 0, 0), Load(0, 0, 0, math.nan)])
def test_a_heartbeat_that_cannot_be_is_refused(load: Load) -> None:
    with pytest.raises(ProviderError):
        fleet(only=FAST).note_load("only", {"m": load}, 0.0)


KINDS = ["submit", "submit", "finish", "fail", "abandon", "leave", "join", "tick"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30)), max_size=120)
SLOTS = {"p0": 1, "p1": 3}


class Fleet:
    """Hold a dispatcher and its invariant: each request is in one place."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(QueueLimits(10, 10, 1e9))
        self.here: set[str] = set()
        self.running: dict[int, str] = {}
        self.waiting: set[int] = set()
        self.failed_at: defaultdict[int, set[str]] = defaultdict(set)
        self.number = 0
        self.now_s = 0.0

    def place(self, assignments: Sequence[Assignment | None]) -> None:
        for one in assignments:
            if one is not None:
                self.waiting.discard(one.ask.number)
                assert one.ask.number not in self.running
                self.running[one.ask.number] = one.provider

    def submit(self, value: int) -> None:
        self.number += 1
        self.waiting.add(self.number)
        try:
            made = ask(self.number, f"a{value % 3}", deadline_s=1e12)
            self.place([self.dispatcher.submit(made, self.now_s)])
        except QueueFull:
            self.waiting.discard(self.number)

    def finish(self, value: int) -> None:
        if self.running:
            number = self._one_of(self.running, value)
            del self.running[number]
            self.place(
                self.dispatcher.finished(number, self.now_s, first_s=0.1, output_tokens=3, decode_s=0.1)
            )

    def fail(self, value: int) -> None:
        if self.running:
            number = self._one_of(self.running, value)
            self.failed_at[number].add(self.running.pop(number))
            failed, freed = self.dispatcher.failed(number, self.now_s)
            assert failed is not None
            self.place(freed)
            self.waiting.add(number)
            self.place([self.dispatcher.again(failed, self.now_s)])

    def abandon(self, value: int) -> None:
        if self.running or self.waiting:
            number = self._one_of([*self.running, *self.waiting], value)
            self.running.pop(number, None)
            self.waiting.discard(number)
            self.place(self.dispatcher.abandon(number, self.now_s))

    def leave(self, value: int) -> None:
        self.here.discard(f"p{value % 2}")
        for lost in self.dispatcher.leave(f"p{value % 2}"):
            del self.running[lost.number]

    def join(self, value: int) -> None:
        name = f"p{value % 2}"
        if name not in self.here:
            self.here.add(name)
            offer = {"m": replace(FAST, slots=SLOTS[name])}
            self.place(self.dispatcher.join(name, offer, Level.NONE, self.now_s))

    def tick(self, _: int) -> None:
        self.now_s += 100.0
        self.place(self.dispatcher.tick(self.now_s)[1])
        # no provider is shut any more; a failed one gets one request at a time
        idle = self.here - set(self.running.values())
        for number in self.waiting if idle else ():
            # it waits for another one than it failed at
            assert idle <= self.failed_at[number]
            assert idle < self.here

    def check(self) -> None:
        for provider, count in SLOTS.items():
            assert sum(one == provider for one in self.running.values()) <= count
        assert self.dispatcher.waiting("m") == len(self.waiting)

    @staticmethod
    def _one_of(numbers: Iterable[int], value: int) -> int:
        known = sorted(numbers)
        return known[value % len(known)]


@settings(max_examples=examples(150), deadline=None)
@given(EVENTS)
def test_no_slot_is_taken_twice_and_nothing_waits_while_one_is_free(events: list[tuple[str, int]]) -> None:
    fleet = Fleet()
    for kind, value in events:
        fleet.now_s += 1.0
        getattr(fleet, kind)(value)
        fleet.check()
