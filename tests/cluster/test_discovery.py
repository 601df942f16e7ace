"""Members that are found on the local network, and the limits of announcements."""

from __future__ import annotations

import ipaddress
import os
import secrets
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from convoy.cluster import discovery
from convoy.cluster.discovery import (
    MAX_ADDRESSES,
    MAX_INSTANCES,
    SERVICE,
    Discovery,
    Sightings,
    fingerprint,
    local_addresses,
)
from convoy.errors import ConfigError
from convoy.transport.member import Roster
from support.members import make_local_members

if TYPE_CHECKING:
    from zeroconf import ServiceInfo

WAIT_S = 20.0
SALT = bytes(range(16))
ANY = "0.0.0.0"  # noqa: S104 - what a member binds to by default


@pytest.fixture(scope="module")
def roster() -> Roster:
    return make_local_members(["alpha", "beta"])[0].roster


@pytest.fixture
def sightings(roster: Roster) -> Sightings:
    return Sightings(lambda: roster.members)


def said_by(roster: Roster, name: str, salt: bytes = SALT) -> dict[bytes, bytes | None]:
    return {b"s": salt, b"f": fingerprint(salt, roster.member(name).identity_key)}


def instance(number: int) -> str:
    return f"{number:016x}.{SERVICE}"


def test_a_member_is_recognised_by_its_salted_fingerprint(sightings: Sightings, roster: Roster) -> None:
    sightings.judge(instance(1), said_by(roster, "beta"), [("192.0.2.7", 7777), ("fe80::1%2", 7777)])
    assert sightings.find("beta") == (("192.0.2.7", 7777), ("fe80::1%2", 7777))
    assert sightings.find("alpha") == ()
    sightings.forget(instance(1))
    assert sightings.find("beta") == ()


def test_the_fingerprint_is_another_under_each_salt_and_says_no_name(roster: Roster) -> None:
    key = roster.member("beta").identity_key
    assert fingerprint(SALT, key) != fingerprint(bytes(16), key)
    assert len(fingerprint(SALT, key)) == 16
    assert fingerprint(SALT, key) not in key


@pytest.mark.parametrize(
    "change",
    [
        {b"s": b""},
        {b"s": SALT + b"\0"},
        {b"s": None},
        {b"f": b""},
        {b"f": bytes(15)},
        {b"f": bytes(16)},
        {b"f": bytes(4096)},
        {b"x": b"more"},
    ],
)
def test_an_announcement_of_any_other_form_is_ignored(
    sightings: Sightings, roster: Roster, change: dict[bytes, bytes | None]
) -> None:
    sightings.judge(instance(1), {**said_by(roster, "beta"), **change}, [("192.0.2.7", 7777)])
    assert sightings.find("beta") == ()
    assert sightings.num_instances == 0


@pytest.mark.parametrize(
    "address", [(ANY, 7777), ("224.0.0.251", 7777), ("nobody.example", 7777), ("192.0.2.7", 0)]
)
def test_an_address_that_nobody_can_have_is_no_candidate(
    sightings: Sightings, roster: Roster, address: tuple[str, int]
) -> None:
    sightings.judge(instance(1), said_by(roster, "beta"), [address])
    assert sightings.find("beta") == ()


def test_foreign_announcements_by_the_thousand_leave_nothing_behind(roster: Roster) -> None:
    sightings = Sightings(lambda: roster.members)
    tracemalloc.start()
    for number in range(20_000):
        text: dict[bytes, bytes | None] = {b"s": os.urandom(16), b"f": os.urandom(16)}
        sightings.judge(instance(number), text, [("192.0.2.66", 7777)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000
    assert sightings.find("beta") == ()


def test_what_repeats_a_members_words_by_the_thousand_is_bounded(roster: Roster) -> None:
    now_s = [0.0]
    sightings = Sightings(lambda: roster.members, clock=lambda: now_s[0])
    words = said_by(roster, "beta")
    for number in range(5000):
        now_s[0] += 0.01
        sightings.judge(instance(number), words, [(f"10.0.{number % 256}.{i}", 7777) for i in range(1, 40)])
    assert len(sightings.find("beta")) <= MAX_INSTANCES * MAX_ADDRESSES
    assert sightings.num_instances <= MAX_INSTANCES


def test_one_name_under_which_two_members_words_are_repeated_breaks_nothing(roster: Roster) -> None:
    sightings = Sightings(lambda: roster.members)
    alpha, beta = (said_by(roster, name, os.urandom(16)) for name in ("alpha", "beta"))
    for words in (alpha, beta):
        sightings.judge(instance(0), words, [("192.0.2.1", 7777)])
    assert (sightings.find("alpha"), sightings.find("beta")) == ((), (("192.0.2.1", 7777),))
    sightings.forget(instance(0))
    for number in range(1, 2 * MAX_INSTANCES):
        sightings.judge(instance(number), alpha, [("192.0.2.2", 7777)])
    assert sightings.find("alpha") == (("192.0.2.2", 7777),)
    assert sightings.find("beta") == ()


def test_no_more_announcements_are_judged_than_the_rate_allows(roster: Roster) -> None:
    asked = []

    def members() -> Iterator[object]:
        asked.append(1)
        return iter(roster.members)

    sightings = Sightings(members, clock=lambda: 0.0)  # type: ignore[arg-type]
    for number in range(5000):
        sightings.judge(instance(number), {b"s": SALT, b"f": bytes(16)}, [])
    assert len(asked) == 1000


def test_a_wildcard_is_announced_by_the_addresses_of_this_machine() -> None:
    four, both = local_addresses(ANY), local_addresses("::")
    assert four
    assert all(ipaddress.ip_address(host).version == 4 for host in four)
    assert set(four) <= set(both) or both == ["127.0.0.1", "::1"]
    assert ANY not in four
    assert local_addresses("192.0.2.1") == ["192.0.2.1"]


def test_without_the_extra_it_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(ConfigError, match="discovery needs the package zeroconf") as refused:
        discovery.DiscoveredNetwork()
    assert refused.value.hint is not None
    assert "pip install 'WHEEL[discovery]'" in refused.value.hint


def test_names_and_salt_are_random_per_start_and_nothing_else_is_said(roster: Roster) -> None:
    key = roster.member("beta").identity_key
    first, second = (discovery.make_info(key, ("192.0.2.1", 7777)) for _ in range(2))
    for info in (first, second):
        assert info.port == 7777
        assert set(info.properties) == {b"s", b"f"}
        assert sorted(len(value or b"") for value in info.properties.values()) == [16, 16]
        assert "beta" not in str(info)
    assert first.name != second.name
    assert first.server != second.server
    assert first.properties[b"s"] != second.properties[b"s"]


@pytest.fixture
def two(roster: Roster) -> Iterator[tuple[Discovery, Discovery]]:
    """Yield two instances on this machine's own interfaces."""
    try:
        both = (Discovery(lambda: roster.members), Discovery(lambda: roster.members))
    except ConfigError as error:
        pytest.skip(f"no multicast here: {error.message}")
    yield both
    for each in both:
        each.close()


def test_one_instance_finds_what_another_announces_until_it_is_taken_back(
    two: tuple[Discovery, Discovery], roster: Roster
) -> None:
    withdraw = two[1].announce(roster.member("beta").identity_key, ("127.0.0.1", 7777))
    until_s = time.monotonic() + WAIT_S
    while not two[0].find("beta"):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert two[0].find("beta") == (("127.0.0.1", 7777),)
    withdraw()
    while two[0].find("beta"):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_laptop_that_wakes_in_another_network_is_found_at_its_new_address(
    two: tuple[Discovery, Discovery], roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["127.0.0.2"]
    monkeypatch.setattr(discovery, "local_addresses", lambda _bound: list(addresses))
    made: list[ServiceInfo] = []
    make = discovery.make_info

    def make_and_keep(identity_key: bytes, bound: tuple[str, int]) -> ServiceInfo:
        made.append(make(identity_key, bound))
        return made[-1]

    monkeypatch.setattr(discovery, "make_info", make_and_keep)
    two[1].announce(roster.member("beta").identity_key, ("0.0.0.0", 7777))  # noqa: S104
    until_s = time.monotonic() + WAIT_S
    for expected in ("127.0.0.2", "127.0.0.3"):
        addresses[:] = [expected]
        two[1].look_around()
        # The newest comes first; the old address stays until it expires.
        while two[0].find("beta")[:1] != ((expected, 7777),):
            assert time.monotonic() < until_s
            time.sleep(0.01)
    # The instance began with other addresses too. No listener sees that it is one machine.
    assert len(made) == 3
    assert len({info.name for info in made}) == len({info.properties[b"s"] for info in made}) == 3


def test_a_member_that_is_new_in_the_roster_is_found_by_what_it_said_before(roster: Roster) -> None:
    members = list(roster.members[:1])
    try:
        hears, speaks = Discovery(lambda: members), Discovery(lambda: roster.members)
    except ConfigError as error:
        pytest.skip(f"no multicast here: {error.message}")
    speaks.announce(roster.member("beta").identity_key, ("127.0.0.1", 7777))
    until_s = time.monotonic() + WAIT_S
    while not speaks.find("beta"):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert hears.find("beta") == ()
    members.append(roster.member("beta"))
    while not hears.find("beta"):
        assert time.monotonic() < until_s
        hears.hear_again()
        time.sleep(0.01)
    hears.close()
    speaks.close()


def test_a_flood_of_announcements_on_the_wire_hides_no_member(
    two: tuple[Discovery, Discovery], roster: Roster, tmp_path: Path
) -> None:
    """Let another process announce without end: the found and the held addresses stay the same."""
    flood = tmp_path / "flood.py"
    flood.write_text(_FLOOD)
    with subprocess.Popen([sys.executable, str(flood)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "flooding"
        withdraw = two[1].announce(roster.member("beta").identity_key, ("127.0.0.1", 7777))
        until_s = time.monotonic() + WAIT_S
        while not two[0].find("beta"):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        withdraw()
        process.kill()
    assert two[0].names <= {"beta"}


_FLOOD = f"""
import os, secrets, socket, time
from zeroconf import DNSOutgoing, DNSPointer, DNSService, DNSText, const
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print("flooding", flush=True)
for _ in range(4000):
    name = secrets.token_hex(8) + ".{SERVICE}"
    out = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA)
    kind, cls = "{SERVICE}", const._CLASS_IN
    text = bytes([18]) + b"s=" + os.urandom(16) + bytes([18]) + b"f=" + os.urandom(16)
    out.add_answer_at_time(DNSPointer(kind, const._TYPE_PTR, cls, 4500, name), 0)
    out.add_answer_at_time(DNSText(name, const._TYPE_TXT, cls, 4500, text), 0)
    out.add_answer_at_time(DNSService(name, const._TYPE_SRV, cls, 4500, 0, 0, 7777, "x.local."), 0)
    for packet in out.packets():
        sock.sendto(packet, ("224.0.0.251", 5353))
    time.sleep(0.001)
"""


def test_an_instance_name_has_nothing_of_this_machine(roster: Roster) -> None:
    info = discovery.make_info(roster.member("beta").identity_key, ("127.0.0.1", 7777))
    host = (info.server or "").removesuffix(".local.")
    assert len(bytes.fromhex(host)) == len(bytes.fromhex(info.name.removesuffix(f".{SERVICE}"))) == 8
    assert secrets.compare_digest(host, host.lower())
