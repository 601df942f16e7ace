"""The only stream without sealing: its addresses. `make check` shows which modules use it."""

from __future__ import annotations

from convoy.bench.hop.names import HOST


def test_the_plain_stream_stays_on_loopback() -> None:
    assert HOST == "127.0.0.1"
