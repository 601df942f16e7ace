"""Write a roster's body as TOML, and read it back: text that a person can read and a member reads strictly.

Unknown and missing fields are refused, so that two versions never read one signed text in two ways.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import tomllib
from collections.abc import Mapping
from typing import Any

from convoy.errors import RosterError
from convoy.transport.member import Member, Roster
from convoy.trust.roster.check import MAX_HOST, MAX_MEMBERS, check_member, check_roster

COPY_HINT = "copy the roster's file again from the operator's machine"
_REMEDY = "install the version of Convoy that signed this roster"

FORMAT = 1

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_MEMBER_KEYS = frozenset({"name", "address", "head", "identity_key", "certificate"})
_MEMBER_EXTRAS = frozenset({"attestation_key"})
_ROSTER_KEYS = frozenset({"format", "cluster_id", "epoch", "not_before", "expires", "members"})


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of ``host:port``, with an IPv6 host in brackets. Raises `RosterError`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not digits or not 0 < int(port) < 65536:
        raise RosterError(
            f"{text[:MAX_HOST]!r} is no address, expected host:port (IPv6 in brackets: [::1]:7777)",
            hint="give a port too, as in beta.example:7777",
        )
    return host, int(port)


def format_address(address: tuple[str, int]) -> str:
    """Return the text that `parse_address` reads."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def member_to_toml(member: Member) -> str:
    """Return the lines of one member, without a table header. No value needs escaping."""
    lines = (
        f'name = "{member.name}"\n'
        f'address = "{format_address(member.address)}"\n'
        f"head = {str(member.head).lower()}\n"
        f'identity_key = "{member.identity_key.hex()}"\n'
        f'certificate = "{base64.b64encode(member.certificate_der).decode()}"\n'
    )
    if member.attestation_key:
        lines += f'attestation_key = "{base64.b64encode(member.attestation_key).decode()}"\n'
    return lines


def member_from_table(table: object) -> Member:
    """Return a member from parsed TOML. Raises `RosterError` naming the field."""
    member = _read_member(table)
    check_member(member)
    return member


def _read_member(table: object) -> Member:
    if not isinstance(table, Mapping):
        raise RosterError("a member of the roster is not a table", hint=COPY_HINT)
    check_keys(table, _MEMBER_KEYS, "a member", _MEMBER_EXTRAS)
    name = get(table, "name", str)
    try:
        identity_key = bytes.fromhex(get(table, "identity_key", str))
        certificate = base64.b64decode(get(table, "certificate", str), validate=True)
        attestation_key = base64.b64decode(
            get(table, "attestation_key", str) if "attestation_key" in table else "", validate=True
        )
    except (ValueError, binascii.Error):
        raise RosterError(f"the keys of {name[:63]!r} are not hex and base64") from None
    address = parse_address(get(table, "address", str))
    head = get(table, "head", bool)
    return Member(name, identity_key, certificate, address, head, attestation_key)


def parse_body(body: bytes) -> Roster:
    """Return the roster in a body, after its signature was checked. Raises `RosterError`."""
    table = parse_toml(body)
    check_keys(table, _ROSTER_KEYS, "the roster")
    if get(table, "format", int) != FORMAT:
        raise RosterError(f"the roster has format {table['format']}, expected {FORMAT}", hint=_REMEDY)
    members = get(table, "members", list)
    roster = Roster(
        cluster_id=get(table, "cluster_id", str),
        epoch=get(table, "epoch", int),
        not_before=_time(table, "not_before"),
        expires=_time(table, "expires"),
        # One more than allowed is read, so that `check_roster` refuses the number without reading the rest.
        members=tuple(_read_member(member) for member in members[: MAX_MEMBERS + 1]),
    )
    check_roster(roster)
    return roster


def format_body(roster: Roster) -> bytes:
    """Return the bytes that are signed."""
    lines = (
        "# Convoy roster. Signed: a change by hand breaks the signature; use `convoy roster`.\n"
        f"format = {FORMAT}\n"
        f'cluster_id = "{roster.cluster_id}"\n'
        f"epoch = {roster.epoch}\n"
        f"not_before = {roster.not_before.astimezone(datetime.UTC).strftime(_TIME)}\n"
        f"expires = {roster.expires.astimezone(datetime.UTC).strftime(_TIME)}\n"
    )
    return (lines + "".join("\n[[members]]\n" + member_to_toml(m) for m in roster.members)).encode()


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the parsed TOML. Raises `RosterError` for any other data."""
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        # ValueError includes TOMLDecodeError, and the error of int() for a number of 4,301 digits.
        raise RosterError("the roster is not TOML", hint=COPY_HINT) from None


def check_keys(
    table: Mapping[str, Any], expected: frozenset[str], what: str, extras: frozenset[str] = frozenset()
) -> None:
    """Check that a table has each of ``expected``, perhaps some of ``extras``, and nothing else.

    Raises `RosterError`.
    """
    for key in sorted(expected - table.keys()):
        raise RosterError(f"{what} has no {key}", hint=COPY_HINT)
    for key in sorted(table.keys() - expected - extras):
        raise RosterError(f"{what} has the unknown field {key[:63]!r}", hint=_REMEDY)


def get(table: Mapping[str, Any], key: str, kind: type) -> Any:
    """Return a field of exactly this type. Raises `RosterError`."""
    value = table[key]
    # A bool is an int to isinstance.
    if type(value) is not kind:
        raise RosterError(f"{key} in the roster is a {type(value).__name__}, expected {kind.__name__}")
    # A longer one cannot even be printed.
    if kind is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RosterError(f"{key} in the roster does not fit 64 bits")
    return value


def _time(table: Mapping[str, Any], key: str) -> datetime.datetime:
    value: datetime.datetime = get(table, key, datetime.datetime)
    if value.tzinfo is None:
        raise RosterError(f"{key} in the roster has no time zone, expected UTC (Z)")
    try:
        return value.astimezone(datetime.UTC)
    except OverflowError:
        raise RosterError(f"{key} in the roster is a time outside the calendar") from None
