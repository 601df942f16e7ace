"""The choice of the connection that gives way: the tables alone, with a clock that a test turns."""

from __future__ import annotations

import pytest

from convoy.api.listen.http_limits import HttpLimits
from convoy.errors import QueueFull
from convoy.transport.listen.places import ConnectionSlot, ConnectionSlots, Given, SlotLimits

HOME, AWAY = "192.0.2.1", "192.0.2.2"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class PlacesUnderTest:
    """Hold places, and which connections were cut, by number."""

    def __init__(self, unproven: int = 4, per_address: int = 4, kept: int = 2) -> None:
        self.clock = Clock()
        self.places = ConnectionSlots(SlotLimits(unproven, 2, kept, per_address), 10.0, self.clock)
        self.cut: list[int] = []
        self.num_taken = 0

    def take(self, host: str = HOME) -> ConnectionSlot:
        number = self.num_taken
        self.num_taken += 1
        return self.places.take(host, lambda: self.cut.append(number))


def test_the_oldest_unproven_connection_gives_way() -> None:
    under_test = PlacesUnderTest()
    first, *_ = [under_test.take() for _ in range(6)]
    assert under_test.cut == [0, 1]
    assert first.given is Given.WAY
    assert under_test.places.num_waiting == 4


def test_a_kept_connection_never_gives_way() -> None:
    under_test = PlacesUnderTest()
    under_test.take().keep()
    for _ in range(100):
        under_test.take()
    assert 0 not in under_test.cut
    assert under_test.places.num_kept == 1


def test_a_connection_between_two_requests_is_unproven_again() -> None:
    under_test = PlacesUnderTest()
    place = under_test.take()
    place.keep()
    place.wait()
    for _ in range(4):
        under_test.take()
    assert under_test.cut == [0]


def test_a_request_that_came_does_not_give_way_to_silent_connections() -> None:
    under_test = PlacesUnderTest()
    under_test.take().work()
    for _ in range(100):
        under_test.take()
    assert 0 not in under_test.cut


def test_of_requests_that_nobody_let_in_the_oldest_gives_way_to_another() -> None:
    under_test = PlacesUnderTest()
    for _ in range(3):
        under_test.take().work()
    assert under_test.cut == [0]
    assert under_test.places.num_working == 2


def test_a_kept_connection_that_gets_another_request_stays_kept() -> None:
    under_test = PlacesUnderTest()
    place = under_test.take()
    place.keep()
    place.work()
    assert (under_test.places.num_kept, under_test.places.num_working) == (1, 0)


def test_the_address_with_the_most_connections_gives_way() -> None:
    under_test = PlacesUnderTest()
    under_test.take(AWAY)
    for _ in range(10):
        under_test.take(HOME)
    assert 0 not in under_test.cut
    assert len(under_test.cut) == 7


def test_one_address_holds_no_more_than_its_share() -> None:
    under_test = PlacesUnderTest(unproven=8, per_address=2)
    for _ in range(4):
        under_test.take(HOME)
    assert under_test.places.num_waiting == 2
    under_test.take(AWAY)
    assert under_test.places.num_waiting == 3


def test_an_ipv6_network_counts_as_one_address() -> None:
    under_test = PlacesUnderTest(unproven=8, per_address=2)
    for i in range(4):
        under_test.take(f"2001:db8::{i + 1}")
    assert under_test.places.num_waiting == 2


def test_a_header_that_is_late_ends_its_connection() -> None:
    under_test = PlacesUnderTest()
    under_test.take()
    under_test.clock.now_s += 9.9
    under_test.take()
    assert under_test.places.expire() == 0
    under_test.clock.now_s += 0.2
    assert under_test.places.expire() == 1
    assert under_test.cut == [0]


def test_a_header_that_came_has_no_deadline_until_the_next_request() -> None:
    under_test = PlacesUnderTest()
    place = under_test.take()
    place.work()
    under_test.clock.now_s += 1000.0
    assert under_test.places.expire() == 0
    place.wait()
    under_test.clock.now_s += 10.0
    assert under_test.places.expire() == 1


def test_one_more_than_may_be_answered_is_refused() -> None:
    under_test = PlacesUnderTest(kept=2)
    for _ in range(2):
        under_test.take().keep()
    late = under_test.take()
    with pytest.raises(QueueFull, match="answers 2 connections"):
        late.keep()
    assert under_test.places.num_kept == 2


def test_a_connection_that_ended_takes_no_place_again() -> None:
    under_test = PlacesUnderTest()
    place = under_test.take()
    place.release()
    place.release()
    place.wait()
    place.keep()
    assert under_test.places.num_waiting == under_test.places.num_working == under_test.places.num_kept == 0


def test_what_is_shed_is_the_oldest() -> None:
    under_test = PlacesUnderTest()
    for _ in range(4):
        under_test.take()
    assert under_test.places.shed(2) == 2
    assert under_test.cut == [0, 1]
    assert under_test.places.shed(5) == 2


@pytest.mark.parametrize("num_descriptors", [64, 256, 1024, 4096, 1_000_000])
def test_descriptors_are_left_for_all_else(num_descriptors: int) -> None:
    limits = HttpLimits()
    capacity = limits.fit(num_descriptors)
    spare = num_descriptors - capacity.waiting - capacity.working - capacity.kept
    assert spare >= min(limits.spare_descriptors, num_descriptors // 2)
    assert capacity.kept >= capacity.waiting >= capacity.of_one_address > 0
    assert capacity.working >= capacity.of_one_address
