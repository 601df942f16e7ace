from __future__ import annotations

import datetime
import tomllib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import RosterError
from convoy.transport.member import LocalMember, Member, Roster
from convoy.trust.roster.card import member_of, read_card, write_card
from convoy.trust.roster.roster import format_address, make_roster, open_roster, parse_address, sign_roster

NOW = datetime.datetime(2026, 11, 21, 12, 0, 0, tzinfo=datetime.UTC)
OPERATOR = OperatorKey.generate()
ALPHA, BETA = Identity.generate(), Identity.generate()
MEMBERS = (
    member_of("alpha", ALPHA, ("127.0.0.1", 7001), head=True),
    member_of("beta", BETA, ("::1", 7002)),
)
ROSTER = make_roster("home", MEMBERS, epoch=4, not_before=NOW)


def opened(data: bytes, **changes: object) -> Roster:
    arguments: dict[str, object] = {"operator_key": OPERATOR.public_key, "now": NOW, "cluster_id": "home"}
    return open_roster(data, **{**arguments, **changes}).roster  # type: ignore[arg-type]


def test_a_signed_roster_opens_as_what_was_signed() -> None:
    data = sign_roster(ROSTER, OPERATOR)
    signed = open_roster(data, operator_key=OPERATOR.public_key, now=NOW)
    assert signed.roster == ROSTER
    assert signed.digest == ROSTER.digest
    assert signed.raw == data


def test_the_file_is_toml_as_a_whole() -> None:
    table = tomllib.loads(sign_roster(ROSTER, OPERATOR).decode())
    assert [member["name"] for member in table["members"]] == ["alpha", "beta"]
    assert table["signature"]["operator"] == OPERATOR.public_key.hex()


def test_an_unsigned_roster_is_refused() -> None:
    body = sign_roster(ROSTER, OPERATOR).split(b"\n[signature]")[0]
    with pytest.raises(RosterError, match="is unsigned"):
        opened(body)


def test_a_roster_of_another_operator_is_refused() -> None:
    with pytest.raises(RosterError, match="another operator"):
        opened(sign_roster(ROSTER, OperatorKey.generate()))


def test_a_forged_operator_line_does_not_help() -> None:
    mallory = OperatorKey.generate()
    data = sign_roster(ROSTER, mallory)
    forged = data.replace(mallory.public_key.hex().encode(), OPERATOR.public_key.hex().encode())
    with pytest.raises(RosterError, match="changed after it was signed"):
        opened(forged)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    changed = bytearray(sign_roster(ROSTER, OPERATOR))
    bit = data.draw(st.integers(0, 8 * len(changed) - 1))
    changed[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(RosterError):
        opened(bytes(changed))


def test_another_spelling_of_the_same_signature_is_refused() -> None:
    data = sign_roster(ROSTER, OPERATOR)
    assert data.endswith(b'=="\n')
    last = data[-5:-4]
    assert last in b"AQgw", "four bits of the last character say nothing"
    for other in (data[:-5] + bytes([last[0] + 1]) + data[-4:], data + b"\n", data[:-1]):
        with pytest.raises(RosterError, match="spelled otherwise"):
            opened(other)


def test_a_member_slipped_in_behind_the_signature_is_refused() -> None:
    data = sign_roster(ROSTER, OPERATOR)
    with pytest.raises(RosterError):
        opened(data + b'\n[[members]]\nname = "mallory"\n')


def test_a_second_signature_table_does_not_hide_a_change() -> None:
    data = sign_roster(ROSTER, OPERATOR)
    tail = data[data.rindex(b"\n[signature]") :]
    with pytest.raises(RosterError, match="changed after it was signed"):
        opened(data + b"\nepoch = 9\n" + tail)


def test_a_roster_of_another_cluster_names_both() -> None:
    with pytest.raises(RosterError, match="for cluster home, expected away"):
        opened(sign_roster(ROSTER, OPERATOR), cluster_id="away")


def test_an_expired_roster_says_when() -> None:
    with pytest.raises(
        RosterError, match=r"expired at 2026-12-21 12:00:00 UTC, and it is 2026-12-21 12:00:00"
    ):
        opened(sign_roster(ROSTER, OPERATOR), now=NOW + datetime.timedelta(days=30))


def test_a_roster_from_the_future_is_refused() -> None:
    with pytest.raises(RosterError, match="not valid before 2026-11-21 12:00:00 UTC"):
        opened(sign_roster(ROSTER, OPERATOR), now=NOW - datetime.timedelta(seconds=1))


def test_a_roster_without_this_member_is_refused() -> None:
    with pytest.raises(RosterError, match="gamma is not in the roster of home, which lists alpha, beta"):
        LocalMember("gamma", Identity.generate(), ROSTER)


def test_a_roster_with_another_key_for_this_member_is_refused() -> None:
    with pytest.raises(RosterError, match="another identity key for alpha") as caught:
        LocalMember("alpha", BETA, ROSTER)
    assert str(caught.value.hint).startswith("the keys are beta's: mend [cluster] name or identity")
    with pytest.raises(RosterError, match="another identity key for alpha") as caught:
        LocalMember("alpha", Identity.generate(), ROSTER)
    assert "`convoy roster remove alpha`" in str(caught.value.hint)


def _with(index: int, **changes: object) -> tuple[Member, ...]:
    members = list(MEMBERS)
    members[index] = replace(members[index], **changes)  # type: ignore[arg-type]
    return tuple(members)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: make_roster("home", ()), "lists 0 members"),
        (lambda: make_roster("home sweet", MEMBERS), "cannot name a cluster"),
        (lambda: make_roster("home", MEMBERS, epoch=0), "epoch 0, expected 1 or more"),
        (lambda: make_roster("home", MEMBERS, lifetime=datetime.timedelta(0)), "expires before it is valid"),
        (lambda: make_roster("home", _with(1, name="alpha")), "same name twice: alpha and alpha"),
        (lambda: make_roster("home", _with(1, name='a"\nepoch = 9')), "cannot name a member"),
        (lambda: make_roster("home", _with(1, identity_key=ALPHA.public_key)), "same identity key twice"),
        (
            lambda: make_roster("home", _with(1, certificate_der=ALPHA.tls_certificate_der)),
            "same TLS key twice: alpha and beta",
        ),
        (lambda: make_roster("home", _with(0, head=False)), "no member that may be head"),
        (lambda: make_roster("home", _with(1, address=("host", 0))), "a port of 1 to 65535"),
        (lambda: make_roster("home", _with(1, address=('h"', 1))), "beta has address"),
        *(
            (lambda host=host: make_roster("home", _with(1, address=(host, 1))), "beta has address")
            for host in ("a..b", ".", ".a", "a" * 64, "%", "::%", "::1%", "1:2", "-" * 255, "a." * 127, "é")
        ),
        (
            lambda: make_roster("home", MEMBERS, lifetime=datetime.timedelta(days=10**7)),
            "after the year 9999",
        ),
        (
            lambda: make_roster("home", MEMBERS, lifetime=datetime.timedelta(seconds=1.5)),
            "whole seconds",
        ),
        (lambda: make_roster("home", _with(1, certificate_der=b"x")), "certificate of beta is unusable"),
        (lambda: make_roster("home", _with(1, identity_key=b"x")), "identity key of 1 bytes, expected 32"),
    ],
)
def test_a_roster_that_makes_no_sense_cannot_be_made(make: Callable[[], Roster], named: str) -> None:
    with pytest.raises(RosterError, match=named):
        make()


def _signed_text(change: Callable[[str], str]) -> bytes:
    """Sign, as the operator, a roster with a body that our own code would not write."""
    body = sign_roster(ROSTER, OPERATOR).decode().split("\n[signature]")[0]
    changed = change(body).encode()
    import base64

    signature = base64.b64encode(OPERATOR.sign(b"convoy signed roster v1\0" + changed)).decode()
    tail = f'\n[signature]\noperator = "{OPERATOR.public_key.hex()}"\ned25519 = "{signature}"\n'
    return changed + tail.encode()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("format = 1", "format = 2", "format 2, expected 1"),
        ("epoch = 4", 'epoch = "4"', "epoch in the roster is a str, expected int"),
        ("epoch = 4", "epoch = true", "epoch in the roster is a bool"),
        ("epoch = 4", "epoch = 4\ncolour = 1", "unknown field 'colour'"),
        ("epoch = 4\n", "", "has no epoch"),
        ("head = true", 'head = "true"', "head in the roster is a str"),
        ("2026-11-21T12:00:00Z", "2026-11-21T12:00:00", "no time zone"),
        ('identity_key = "', 'identity_key = "zz', "not hex and base64"),
        ('address = "127.0.0.1:7001"', 'address = "127.0.0.1"', "is no address"),
        ("[[members]]", "[[members]]\n[[", "not TOML"),
        ("epoch = 4", f"epoch = {'1' * 5000}", "not TOML"),
        ("format = 1", f"format = 0x{'f' * 5000}", "format in the roster does not fit 64 bits"),
        ("2026-11-21T12:00:00Z", "1969-12-31T23:59:59Z", "whole seconds from 1970 on"),
        ("2026-11-21T12:00:00Z", "2026-11-21T12:00:00.5Z", "whole seconds from 1970 on"),
        ("2026-12-21T12:00:00Z", "2026-12-21T12:00:00.9Z", "whole seconds from 1970 on"),
        ("2026-12-21T12:00:00Z", "9999-12-31T23:59:59-05:00", "outside the calendar"),
        ('"127.0.0.1:7001"', f'"127.0.0.1:{"1" * 5000}"', "is no address"),
    ],
)
def test_a_signed_but_malformed_roster_is_refused_by_name(old: str, new: str, named: str) -> None:
    with pytest.raises(RosterError, match=named):
        opened(_signed_text(lambda body: body.replace(old, new, 1)))


def test_a_roster_of_more_than_a_mebibyte_is_not_read() -> None:
    with pytest.raises(RosterError, match="the limit is 1048576"):
        opened(bytes(1024 * 1024 + 1))


def test_every_field_changes_the_digest() -> None:
    others = [
        replace(ROSTER, epoch=5),
        replace(ROSTER, cluster_id="away"),
        replace(ROSTER, expires=ROSTER.expires + datetime.timedelta(seconds=1)),
        replace(ROSTER, members=MEMBERS[::-1]),
        replace(ROSTER, members=_with(1, head=True)),
        replace(ROSTER, members=_with(1, address=("::1", 7003))),
    ]
    assert len({roster.digest for roster in [ROSTER, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("text", "address"),
    [("host:7", ("host", 7)), ("[::1]:65535", ("::1", 65535)), ("10.0.0.1:80", ("10.0.0.1", 80))],
)
def test_addresses_are_read_and_written_alike(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert format_address(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "host",
        "host:",
        ":7",
        "::1:7",
        "host:0",
        "host:65536",
        "host:7x",
        "host:²",
        "host:000080",
        f"host:{'1' * 5000}",
    ],
)
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(RosterError, match="is no address"):
        parse_address(text)


def test_a_card_carries_a_member_to_the_operator() -> None:
    card = write_card(MEMBERS[1])
    assert read_card(card) == MEMBERS[1]
    assert read_card(card, head=True).head
    assert "PRIVATE" not in card


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[member]",
        "not toml",
        "[other]\na = 1",
        "x" * 20_000,
        f"[member]\nx = {'1' * 5000}",
        "x = " + "[" * 3000,
    ],
)
def test_a_card_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RosterError):
        read_card(text)


@pytest.mark.parametrize("host", ["a", "a.b.example", "a.b.", "10.0.0.1", "::1", "fe80::1%eth0", "a_b-c"])
def test_hosts_that_sockets_take_are_taken(host: str) -> None:
    assert make_roster("home", _with(1, address=(host, 1))).members[1].address == (host, 1)


def test_an_attestation_key_is_part_of_what_is_signed_and_compared() -> None:
    plain = MEMBERS
    enrolled = [replace(plain[0], attestation_key=b"public key of a TPM"), *plain[1:]]
    roster = make_roster("home", enrolled, not_before=NOW)
    back = open_roster(sign_roster(roster, OPERATOR), operator_key=OPERATOR.public_key, now=NOW).roster
    assert back == roster
    assert back.digest != make_roster("home", plain, not_before=NOW).digest


def test_an_attestation_key_of_absurd_length_is_refused() -> None:
    with pytest.raises(RosterError, match="an attestation key of 1025 bytes, and the limit is 1024"):
        make_roster("home", [replace(MEMBERS[0], attestation_key=bytes(1025))])
