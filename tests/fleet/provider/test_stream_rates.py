from __future__ import annotations

import pytest

from convoy.fleet.capacity import Capacity, Load
from convoy.fleet.coordinator.routing.dispatch import Dispatcher
from convoy.fleet.coordinator.routing.route_request import RouteRequest
from convoy.fleet.provider.stream_rates import StreamRates
from convoy.trust.evidence.level import Level

BOTH = Capacity(slots=4, decode_rate=100, batch_rate=200, prefill_rate=5000, max_context=4096)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_what_each_stream_got_is_measured_and_how_many_there_were() -> None:
    clock = Clock()
    pace = StreamRates(clock)
    pace.begin()
    pace.begin()
    for _ in range(20):  # 2 seconds of two streams, 10 tokens a second each
        clock.now_s += 0.1
        pace.given(2)
    pace.end()
    pace.end()
    clock.now_s += 60.0  # an idle engine is no slow one
    assert pace.beat() == pytest.approx((10.0, 2.0))


def test_what_was_long_ago_counts_for_less_and_then_for_nothing() -> None:
    clock = Clock()
    pace = StreamRates(clock)
    pace.begin()
    clock.now_s += 1.0
    pace.given(8)
    assert pace.beat() == pytest.approx((8.0, 1.0))
    clock.now_s += 1.0
    pace.given(40)
    assert pace.beat() == pytest.approx((44 / 1.5, 1.0))
    pace.end()
    said = [pace.beat()[0] for _ in range(10)]
    assert said[0] == pytest.approx(44 / 1.5)
    assert said[-1] == 0.0


def test_a_reader_that_holds_a_stream_up_makes_no_engine_slow() -> None:
    clock = Clock()
    pace = StreamRates(clock)
    pace.begin()
    clock.now_s += 1.0
    pace.given(10)
    with pace.held_up():
        clock.now_s += 100.0
    assert pace.beat() == pytest.approx((10.0, 1.0))


def ask(number: int) -> RouteRequest:
    return RouteRequest(number, "a", "m", 100, 50, 0.0, 60.0)


def went(dispatcher: Dispatcher, number: int) -> str:
    found = dispatcher.submit(ask(number), 0.0)
    assert found is not None
    dispatcher.abandon(number, 0.0)
    return found.provider


def two() -> Dispatcher:
    dispatcher = Dispatcher()
    for name in ("one", "two"):
        dispatcher.join(name, {"m": BOTH}, Level.NONE, 0.0)
    return dispatcher


def test_a_provider_that_says_it_is_slower_than_it_offered_gets_less() -> None:
    dispatcher = two()
    assert {went(dispatcher, number) for number in range(4)} == {"one", "two"}
    dispatcher.note_load("one", {"m": Load(4, 0, 0, 25.0, 1.0)}, 0.0)  # others have its cores
    assert {went(dispatcher, number) for number in range(4)} == {"two"}
    dispatcher.note_load("one", {"m": Load(4, 0, 0, 0.0, 0.0)}, 0.0)  # nothing ran lately: as it offered
    assert {went(dispatcher, number) for number in range(4)} == {"one", "two"}


def test_a_rate_is_compared_with_that_of_so_many_streams() -> None:
    dispatcher = two()
    dispatcher.note_load("one", {"m": Load(4, 0, 0, 50.0, 4.0)}, 0.0)  # what it offered for four at once
    assert {went(dispatcher, number) for number in range(4)} == {"one", "two"}


def test_a_provider_that_says_it_is_faster_than_answers_showed_gets_no_more_for_it() -> None:
    dispatcher = two()
    for number in range(30):
        found = dispatcher.submit(ask(number), 0.0)
        assert found is not None
        dispatcher.first_token(number)
        took_s = 4.9 if found.provider == "one" else 0.49
        dispatcher.finished(number, 0.0, first_s=0.02, output_tokens=50, decode_s=took_s)
    dispatcher.note_load("one", {"m": Load(4, 0, 0, 1e6, 1.0)}, 0.0)
    assert {went(dispatcher, number) for number in range(4)} == {"two"}
