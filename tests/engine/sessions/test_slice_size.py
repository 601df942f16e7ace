"""How much is carried at once: what takes up to half a second."""

from __future__ import annotations

from convoy.engine.sessions.slice_size import SliceSize

KIB, MIB = 1024, 1024 * 1024


class Wire:
    """Advance a clock with the carried bytes."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.at_s = 0.0

    def carry(self, pace: SliceSize, times: int) -> list[float]:
        took = []
        for _ in range(times):
            began_s = self.at_s
            with pace.measure():
                self.at_s += pace.num_bytes / self.bytes_per_s
            took.append(self.at_s - began_s)
        return took


def test_a_fast_wire_soon_gets_the_most_that_may_be() -> None:
    wire = Wire(1e9)
    pace = SliceSize(16 * MIB, now=lambda: wire.at_s)
    wire.carry(pace, 4)
    assert pace.num_bytes == 16 * MIB
    wire.carry(pace, 4)
    assert pace.num_bytes == 16 * MIB


def test_a_slow_wire_holds_steps_up_for_half_a_second_and_goes_on() -> None:
    wire = Wire(256 * KIB)
    pace = SliceSize(16 * MIB, now=lambda: wire.at_s)
    took = wire.carry(pace, 20)
    assert took[0] == 4.0, "nothing is known before the first"
    assert max(took[4:]) <= 0.5
    wire.bytes_per_s = 1.0
    wire.carry(pace, 5)
    assert pace.num_bytes == 64 * KIB, "something is carried at any rate"
    wire.bytes_per_s = 1e9
    wire.carry(pace, 20)
    assert pace.num_bytes == 16 * MIB


def test_little_is_enough_where_little_may_be() -> None:
    assert SliceSize(32).num_bytes == 32
