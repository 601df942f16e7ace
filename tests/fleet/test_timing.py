from __future__ import annotations

import pytest

from convoy.fleet.timing import SEGMENTS, Timing


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_every_segment_is_there_and_0_where_it_does_not_apply() -> None:
    assert Timing(Clock()).us() == {f"{segment}_us": 0 for segment in SEGMENTS}


def test_tries_add_up_and_what_raises_counts_too() -> None:
    clock = Clock()
    timing = Timing(clock)

    def lose(took_s: float) -> None:
        with timing.measure("dispatch"):
            clock.now_s += took_s
            raise ValueError("lost")

    for took_s in (0.25, 0.5):
        with pytest.raises(ValueError, match="lost"):
            lose(took_s)
    clock.now_s += 0.25
    timing.reach("total_e2e")
    assert timing.us()["dispatch_us"] == 750_000
    assert timing.us()["total_e2e_us"] == 1_000_000


def test_what_took_any_time_took_a_microsecond_and_none_took_less_than_none() -> None:
    timing = Timing(Clock())
    timing.add("parse", 1e-9)
    timing.add("route", -1.0)
    assert (timing.us()["parse_us"], timing.us()["route_us"]) == (1, 0)
    with pytest.raises(KeyError):
        timing.add("lunch", 1.0)
