"""Strangers cannot fill a log, and the lines that were left out are counted."""

from __future__ import annotations

import logging

import pytest

from convoy.transport.log_limit import RateLimitedLog


def test_a_cause_is_written_so_often_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    quiet = RateLimitedLog(logging.getLogger("listener"), max_lines=3, interval_s=10, clock=lambda: now_s[0])
    for i in range(1000):
        quiet.warning("HandshakeError", f"refused number {i}")
    assert len(caplog.records) == 3
    now_s[0] = 10.0
    quiet.flush()
    quiet.flush()
    assert caplog.messages[3:] == ["997 more were refused within 10 s, not logged one by one: HandshakeError"]
    quiet.warning("HandshakeError", "refused again")
    assert caplog.messages[-1] == "refused again"


def test_one_cause_does_not_silence_another(caplog: pytest.LogCaptureFixture) -> None:
    quiet = RateLimitedLog(logging.getLogger("listener"), max_lines=1)
    quiet.warning("HandshakeError", "a stranger")
    quiet.warning("HandshakeError", "another stranger")
    quiet.warning("RosterError", "the roster expired")
    assert caplog.messages == ["a stranger", "the roster expired"]


def test_the_number_of_causes_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    quiet = RateLimitedLog(logging.getLogger("listener"), max_lines=1)
    for i in range(1000):
        quiet.warning(f"cause {i}", "a line")
    assert len(caplog.records) < 100
    assert quiet.num_causes < 100


def test_what_was_left_out_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    quiet = RateLimitedLog(logging.getLogger("listener"), max_lines=1)
    for _ in range(5):
        quiet.warning("FrameError", "garbage")
    quiet.flush(everything=True)
    assert caplog.messages[-1].startswith("4 more were refused")
