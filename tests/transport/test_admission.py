"""Places of a listener, with a clock that the test moves."""

from __future__ import annotations

import pytest

from convoy.transport.admission import Admission, AdmissionLimits, LinkRefusal, Ticket, place_of

LIMITS = AdmissionLimits(
    address_rate=10,
    address_burst=20,
    known_factor=4,
    strangers_rate=50,
    strangers_burst=100,
    max_half_open_per_address=8,
    max_half_open_per_member=3,
    max_addresses=50,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class AdmissionUnderTest:
    """Hold an admission, and the connections that had to give way."""

    def __init__(self, limits: AdmissionLimits = LIMITS, max_half_open: int = 64) -> None:
        self.clock = Clock()
        self.admission = Admission(limits, max_half_open, clock=self.clock)
        self.cut: list[str] = []

    def knock(self, host: str, name: str = "") -> Ticket | LinkRefusal:
        return self.admission.admit(host, lambda: self.cut.append(name or host))

    def enter(self, host: str, name: str = "") -> Ticket:
        ticket = self.knock(host, name)
        assert isinstance(ticket, Ticket)
        return ticket

    def pass_by(self, host: str) -> bool:
        """Go in and out at once: only rates count."""
        ticket = self.knock(host)
        if isinstance(ticket, LinkRefusal):
            return False
        ticket.release()
        return True


def test_an_address_has_a_burst_and_then_its_rate() -> None:
    under_test = AdmissionUnderTest()
    assert [under_test.pass_by("192.0.2.1") for _ in range(25)] == [True] * 20 + [False] * 5
    assert under_test.knock("192.0.2.1") is LinkRefusal.ADDRESS_RATE
    under_test.clock.now_s += 0.5
    assert [under_test.pass_by("192.0.2.1") for _ in range(7)] == [True] * 5 + [False] * 2


def test_one_address_that_floods_takes_nothing_from_another() -> None:
    under_test = AdmissionUnderTest()
    while under_test.pass_by("192.0.2.1"):
        pass
    assert under_test.pass_by("192.0.2.2")


def test_strangers_together_have_a_rate_and_members_are_not_in_it() -> None:
    under_test = AdmissionUnderTest()
    under_test.admission.list_addresses(["198.51.100.1", "beta.example"])
    passed = sum(under_test.pass_by(f"192.0.2.{i % 40}") for i in range(400))
    assert passed == LIMITS.strangers_burst
    assert under_test.knock("203.0.113.9") is LinkRefusal.RATE
    assert all(under_test.pass_by("198.51.100.1") for _ in range(60))


def test_an_address_that_a_member_came_from_is_no_stranger() -> None:
    under_test = AdmissionUnderTest()
    under_test.admission.welcome("203.0.113.9")
    for i in range(400):
        under_test.pass_by(f"192.0.2.{i % 40}")
    assert under_test.pass_by("203.0.113.9")


def test_an_ipv6_host_is_counted_by_its_network() -> None:
    under_test = AdmissionUnderTest()
    passed = sum(under_test.pass_by(f"2001:db8:1:2::{i:x}") for i in range(1, 40))
    assert passed == LIMITS.address_burst
    assert under_test.pass_by("2001:db8:1:3::1")


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("beta.example", None),
    ],
)
def test_what_a_limit_counts_by(host: str, place: str | None) -> None:
    assert place_of(host) == place


def test_the_tables_of_addresses_are_bounded() -> None:
    under_test = AdmissionUnderTest()
    for i in range(1000):
        host = f"10.0.{i // 250}.{i % 250}"
        under_test.admission.welcome(host)
        under_test.knock(host)
    assert under_test.admission.num_addresses <= 2 * LIMITS.max_addresses
    assert under_test.admission.num_half_open <= 64


def test_one_address_cannot_hold_every_place() -> None:
    under_test = AdmissionUnderTest()
    for i in range(20):
        under_test.enter("192.0.2.1", f"silent {i}")
    assert under_test.admission.num_half_open == LIMITS.max_half_open_per_address
    assert under_test.cut == [f"silent {i}" for i in range(12)]  # the oldest give way


def test_strangers_cannot_hold_every_place() -> None:
    under_test = AdmissionUnderTest(max_half_open=16)
    under_test.admission.list_addresses(["198.51.100.1"])
    for i in range(40):
        under_test.enter(f"192.0.2.{i}")
    assert under_test.admission.num_half_open == 12
    cut = len(under_test.cut)
    for _ in range(4):
        under_test.enter("198.51.100.1")
    assert len(under_test.cut) == cut


def test_a_stranger_never_displaces_a_known_address() -> None:
    under_test = AdmissionUnderTest(max_half_open=4)
    under_test.admission.list_addresses(["198.51.100.1"])
    for _ in range(4):
        under_test.enter("198.51.100.1", "known")
    assert under_test.knock("192.0.2.1") is LinkRefusal.FULL
    assert under_test.cut == []


def test_who_showed_a_members_certificate_does_not_give_way() -> None:
    under_test = AdmissionUnderTest(max_half_open=4)
    tickets = [under_test.enter("192.0.2.1", f"first {i}") for i in range(3)]
    assert all(ticket.prove("alpha") for ticket in tickets)
    assert under_test.knock("192.0.2.2") is LinkRefusal.FULL
    tickets[0].release()
    under_test.enter("192.0.2.2")
    assert under_test.cut == []


def test_the_fullest_address_gives_way_first() -> None:
    under_test = AdmissionUnderTest(max_half_open=8)
    under_test.enter("192.0.2.1", "honest and slow")
    for i in range(6):
        under_test.enter("192.0.2.66", f"flood {i}")
    assert under_test.cut == ["flood 0"]


def test_one_member_has_only_so_many_handshakes_under_way() -> None:
    under_test = AdmissionUnderTest()
    tickets = [under_test.enter("192.0.2.1") for _ in range(5)]
    assert [ticket.prove("alpha") for ticket in tickets] == [True, True, True, False, False]
    assert under_test.enter("192.0.2.1").prove("beta")
    tickets[0].release()
    assert tickets[3].prove("alpha")


def test_the_standing_limits_let_a_local_cluster_of_64_start_at_once() -> None:
    limits = AdmissionLimits()
    under_test = AdmissionUnderTest(limits)
    under_test.admission.list_addresses(["127.0.0.1"])
    assert all(under_test.pass_by("127.0.0.1") for _ in range(2 * 64))
