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


class Door:
    """Places, and which connections were cut, by number."""

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
    door = Door()
    first, *_ = [door.take() for _ in range(6)]
    assert door.cut == [0, 1]
    assert first.given is Given.WAY
    assert door.places.num_waiting == 4


def test_a_kept_connection_never_gives_way() -> None:
    door = Door()
    door.take().keep()
    for _ in range(100):
        door.take()
    assert 0 not in door.cut
    assert door.places.num_kept == 1


def test_a_connection_between_two_requests_is_unproven_again() -> None:
    door = Door()
    place = door.take()
    place.keep()
    place.wait()
    for _ in range(4):
        door.take()
    assert door.cut == [0]


def test_a_request_that_came_does_not_give_way_to_silent_connections() -> None:
    door = Door()
    door.take().work()
    for _ in range(100):
        door.take()
    assert 0 not in door.cut


def test_of_requests_that_nobody_let_in_the_oldest_gives_way_to_another() -> None:
    door = Door()
    for _ in range(3):
        door.take().work()
    assert door.cut == [0]
    assert door.places.num_working == 2


def test_a_kept_connection_that_gets_another_request_stays_kept() -> None:
    door = Door()
    place = door.take()
    place.keep()
    place.work()
    assert (door.places.num_kept, door.places.num_working) == (1, 0)


def test_the_address_with_the_most_connections_gives_way() -> None:
    door = Door()
    door.take(AWAY)
    for _ in range(10):
        door.take(HOME)
    assert 0 not in door.cut
    assert len(door.cut) == 7


def test_one_address_holds_no_more_than_its_share() -> None:
    door = Door(unproven=8, per_address=2)
    for _ in range(4):
        door.take(HOME)
    assert door.places.num_waiting == 2
    door.take(AWAY)
    assert door.places.num_waiting == 3


def test_an_ipv6_network_counts_as_one_address() -> None:
    door = Door(unproven=8, per_address=2)
    for i in range(4):
        door.take(f"2001:db8::{i + 1}")
    assert door.places.num_waiting == 2


def test_a_header_that_is_late_ends_its_connection() -> None:
    door = Door()
    door.take()
    door.clock.now_s += 9.9
    door.take()
    assert door.places.expire() == 0
    door.clock.now_s += 0.2
    assert door.places.expire() == 1
    assert door.cut == [0]


def test_a_header_that_came_has_no_deadline_until_the_next_request() -> None:
    door = Door()
    place = door.take()
    place.work()
    door.clock.now_s += 1000.0
    assert door.places.expire() == 0
    place.wait()
    door.clock.now_s += 10.0
    assert door.places.expire() == 1


def test_one_more_than_may_be_answered_is_refused() -> None:
    door = Door(kept=2)
    for _ in range(2):
        door.take().keep()
    late = door.take()
    with pytest.raises(QueueFull, match="answers 2 connections"):
        late.keep()
    assert door.places.num_kept == 2


def test_a_connection_that_ended_takes_no_place_again() -> None:
    door = Door()
    place = door.take()
    place.release()
    place.release()
    place.wait()
    place.keep()
    assert door.places.num_waiting == door.places.num_working == door.places.num_kept == 0


def test_what_is_shed_is_the_oldest() -> None:
    door = Door()
    for _ in range(4):
        door.take()
    assert door.places.shed(2) == 2
    assert door.cut == [0, 1]
    assert door.places.shed(5) == 2


@pytest.mark.parametrize("num_descriptors", [64, 256, 1024, 4096, 1_000_000])
def test_descriptors_are_left_for_all_else(num_descriptors: int) -> None:
    limits = HttpLimits()
    capacity = limits.fit(num_descriptors)
    spare = num_descriptors - capacity.waiting - capacity.working - capacity.kept
    assert spare >= min(limits.spare_descriptors, num_descriptors // 2)
    assert capacity.kept >= capacity.waiting >= capacity.of_one_address > 0
    assert capacity.working >= capacity.of_one_address
