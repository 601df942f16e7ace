"""The log of one loss, by a clock that the test turns."""

from __future__ import annotations

import pytest

from convoy.cluster.recovery.outage import OutageLog


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_an_outage_lasts_from_the_loss_and_is_found_out_once() -> None:
    clock = Clock()
    outage = OutageLog(98.0, clock)
    clock.now_s = 340.0
    assert outage.found_after_s == 2.0
    assert outage.lasts_s == 242.0


def test_what_stands_in_the_way_is_told_once_and_the_number_of_such_things_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = OutageLog(0.0)
    for _ in range(3):
        outage.tell("beta has no memory")
    assert caplog.messages == ["beta has no memory"]
    for number in range(1000):
        outage.tell(f"step {number} failed")
    assert len(caplog.messages) < 50


def test_what_takes_minutes_is_told_every_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = OutageLog(100.0, clock)
    for tenth in range(120):
        clock.now_s = 100.0 + tenth / 10
        outage.progress(f"{tenth}")
    assert caplog.messages == ["50", "100"]
