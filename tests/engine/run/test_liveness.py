"""Whether a peer is there, by its link: what moves counts, and only where nothing does it is asked."""

from __future__ import annotations

from typing import cast

import pytest

from convoy.engine.run.liveness import LivenessProbe, drain_s
from convoy.errors import LinkBroken, PeerUnreachable
from convoy.transport.link.link import Link

MIB = 1024 * 1024


class FakeLink:
    """Answer a ping unless ``silent``, and then spend the time."""

    sent_sealed_bytes = 0
    received_sealed_bytes = 0
    silent = False
    over = False
    moves_late = False

    def __init__(self) -> None:
        self.at_s = 0.0
        self.pings: list[float] = []

    def now(self) -> float:
        return self.at_s

    def ping(self, timeout_s: float) -> float:
        self.pings.append(timeout_s)
        if self.over:
            raise LinkBroken("over")
        self.sent_sealed_bytes += 40
        if self.silent:
            self.at_s += timeout_s
            self.received_sealed_bytes += 100 * self.moves_late
            raise PeerUnreachable("silent")
        return 0.0


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


def probe_of(link: FakeLink, extra_s: float = 0.0) -> LivenessProbe:
    return LivenessProbe(cast(Link, link), extra_s=extra_s, now=link.now)


def first_gone_s(link: FakeLink, probe: LivenessProbe) -> float:
    """Return when the link is first seen as gone, looked at as the carrier does."""
    while not probe.is_gone():
        link.at_s += 0.25
        assert link.at_s < 100, "never found gone"
    return link.at_s


def test_a_peer_that_shows_nothing_is_gone_within_two_seconds(link: FakeLink) -> None:
    link.silent = True
    assert first_gone_s(link, probe_of(link)) <= 2.0


def test_a_peer_that_answers_is_there_however_long_it_is_busy(link: FakeLink) -> None:
    probe = probe_of(link)
    for _ in range(100):
        link.at_s += 0.25
        assert not probe.is_gone()
    assert link.pings
    link.silent = True
    stopped_s = link.at_s
    assert first_gone_s(link, probe) - stopped_s <= 2.0


@pytest.mark.parametrize("way", ["sent_sealed_bytes", "received_sealed_bytes"])
def test_what_moves_is_life_though_the_ping_behind_it_is_not_answered(link: FakeLink, way: str) -> None:
    link.silent = True
    probe = probe_of(link)
    for _ in range(100):
        link.at_s += 0.6
        setattr(link, way, getattr(link, way) + 128 * 1024)
        assert not probe.is_gone()
    assert not link.pings, "who is seen to live need not be asked"


def test_what_moves_while_it_is_asked_is_life(link: FakeLink) -> None:
    link.silent = link.moves_late = True
    probe = probe_of(link)
    link.at_s = 1.0
    assert not probe.is_gone()
    link.moves_late = False
    link.at_s += 1.0
    assert probe.is_gone()


def test_a_link_that_is_over_tells_so_itself(link: FakeLink) -> None:
    link.over = True
    probe = probe_of(link)
    link.at_s = 1.0
    assert not probe.is_gone()


def test_what_the_system_holds_of_a_send_gets_its_time(link: FakeLink) -> None:
    """16 MiB at 256 KiB/s: a quarter of it may still be on its way when all was handed over."""
    assert drain_s(16 * MIB, 64.0) == 16.0
    assert drain_s(1000, 0.5) == 0.5
    assert drain_s(0, 0.0) == 0.0
    link.silent = True
    probe = probe_of(link, extra_s=16.0)
    link.at_s = 1.0
    assert probe.is_gone()
    assert link.pings == [17.0]
