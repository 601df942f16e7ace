"""The signed list of members: TOML that a person can read, and the operator's Ed25519 signature at its end.

In order: `make_roster` -> `sign_roster` -> a file -> `open_roster` at every member. The signature covers the
exact bytes in front of the `[signature]` table, behind a label, so nobody can move a signature to another
kind of text.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import ipaddress
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convoy.crypto.certificate import certificate_key
from convoy.crypto.identity import OperatorKey, verify
from convoy.errors import HandshakeError, IdentityError, RosterError
from convoy.transport.member import Member, Roster

__all__ = [
    "Member",
    "Roster",
    "SignedRoster",
    "check_member",
    "format_address",
    "make_roster",
    "member_from_table",
    "member_to_toml",
    "open_roster",
    "parse_address",
    "sign_roster",
    "verify_roster",
]

FORMAT = 1
MAX_ROSTER_BYTES = 1024 * 1024
MAX_MEMBERS = 1024
DEFAULT_LIFETIME = datetime.timedelta(days=30)

_LABEL = b"convoy signed roster v1\0"
_SEPARATOR = b"\n[signature]\n"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LABELS = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_SCOPE = re.compile(r"[A-Za-z0-9._-]{1,32}")
_MAX_HOST = 253
_FIRST_TIME = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_MEMBER_KEYS = frozenset({"name", "address", "head", "identity_key", "certificate"})
_ROSTER_KEYS = frozenset({"format", "cluster_id", "epoch", "not_before", "expires", "members"})


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """A roster whose signature was checked, and the file that it came from."""

    roster: Roster
    digest: bytes
    raw: bytes = field(repr=False)


def make_roster(
    cluster_id: str,
    members: Iterable[Member],
    *,
    epoch: int = 1,
    not_before: datetime.datetime | None = None,
    lifetime: datetime.timedelta = DEFAULT_LIFETIME,
) -> Roster:
    """A roster that is valid from ``not_before`` (now) for ``lifetime``.

    Raises `RosterError` for what makes no sense.
    """
    start = (not_before or datetime.datetime.now(datetime.UTC)).astimezone(datetime.UTC)
    start = start.replace(microsecond=0)
    try:
        end = start + lifetime
    except OverflowError:
        raise RosterError(f"the roster would expire after the year {datetime.MAXYEAR}") from None
    roster = Roster(cluster_id, epoch, start, end, tuple(members))
    _check(roster)
    return roster


def sign_roster(roster: Roster, operator: OperatorKey) -> bytes:
    """The file to hand to every member. Raises `RosterError` if the roster makes no sense."""
    _check(roster)
    body = _body(roster)
    signature = base64.b64encode(operator.sign(_LABEL + body)).decode()
    signed_by = operator.public_key.hex()
    return body + _SEPARATOR + f'operator = "{signed_by}"\ned25519 = "{signature}"\n'.encode()


def open_roster(
    data: bytes,
    *,
    operator_key: bytes,
    now: datetime.datetime | None = None,
    cluster_id: str | None = None,
) -> SignedRoster:
    """Check and read a roster file; nothing in it is looked at before the signature holds.

    Raises `RosterError`: too long, unsigned, signed by another key, changed, malformed, of another cluster
    (where ``cluster_id`` is given), not valid yet, or expired.
    """
    signed = verify_roster(data, operator_key=operator_key)
    if cluster_id is not None and signed.roster.cluster_id != cluster_id:
        raise RosterError(f"the roster is for cluster {signed.roster.cluster_id}, expected {cluster_id}")
    signed.roster.require_valid(now or datetime.datetime.now(datetime.UTC))
    return signed


def verify_roster(data: bytes, *, operator_key: bytes) -> SignedRoster:
    """As `open_roster`, at any time: to look at a roster, never to trust one. Raises `RosterError`."""
    roster = _parse(_verified_body(data, operator_key))
    return SignedRoster(roster, roster.digest, data)


def check_member(member: Member) -> None:
    """Raises `RosterError` if a member's facts cannot be right."""
    if not _NAME.fullmatch(member.name):
        raise RosterError(
            f"{member.name!r} cannot name a member: 1 to 63 letters, digits, dots, dashes or underscores"
        )
    if len(member.identity_key) != 32:
        raise RosterError(
            f"{member.name} has an identity key of {len(member.identity_key)} bytes, expected 32"
        )
    host, port = member.address
    if not _is_host(host) or not 0 < port < 65536:
        raise RosterError(
            f"{member.name} has address {host[:_MAX_HOST]}:{port}, expected a host and a port of 1 to 65535"
        )
    try:
        tls_key = certificate_key(member.certificate_der)
    except IdentityError as error:
        raise RosterError(f"the certificate of {member.name} is unusable: {error.message}") from error
    if tls_key == member.identity_key:
        raise RosterError(f"{member.name} uses one key for its identity and for TLS, and they must differ")


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, an IPv6 host in brackets. Raises `RosterError`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not digits or not 0 < int(port) < 65536:
        raise RosterError(
            f"{text[:_MAX_HOST]!r} is no address, expected host:port (IPv6 in brackets: [::1]:7777)"
        )
    return host, int(port)


def _is_host(host: str) -> bool:
    """An IPv6 address, or labels of 1 to 63 characters: what sockets take without a `UnicodeError`."""
    if ":" not in host:
        return len(host) <= _MAX_HOST and _LABELS.fullmatch(host) is not None
    address, percent, scope = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _SCOPE.fullmatch(scope) is not None


def format_address(address: tuple[str, int]) -> str:
    """The text that `parse_address` reads."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def member_to_toml(member: Member) -> str:
    """The lines of one member, without a table header. Every value is of a set that needs no escaping."""
    return (
        f'name = "{member.name}"\n'
        f'address = "{format_address(member.address)}"\n'
        f"head = {str(member.head).lower()}\n"
        f'identity_key = "{member.identity_key.hex()}"\n'
        f'certificate = "{base64.b64encode(member.certificate_der).decode()}"\n'
    )


def member_from_table(table: object) -> Member:
    """A member from parsed TOML. Raises `RosterError` naming the field."""
    if not isinstance(table, Mapping):
        raise RosterError("a member of the roster is not a table")
    _check_keys(table, _MEMBER_KEYS, "a member")
    name = _get(table, "name", str)
    try:
        identity_key = bytes.fromhex(_get(table, "identity_key", str))
        certificate = base64.b64decode(_get(table, "certificate", str), validate=True)
    except (ValueError, binascii.Error):
        raise RosterError(f"the keys of {name[:63]!r} are not hex and base64") from None
    address = parse_address(_get(table, "address", str))
    member = Member(name, identity_key, certificate, address, _get(table, "head", bool))
    check_member(member)
    return member


def _verified_body(data: bytes, operator_key: bytes) -> bytes:
    if len(data) > MAX_ROSTER_BYTES:
        raise RosterError(f"the roster has {len(data)} bytes, and the limit is {MAX_ROSTER_BYTES}")
    body, separator, tail = data.rpartition(_SEPARATOR)
    if not separator:
        raise RosterError("the roster is unsigned", hint="sign it: `convoy roster new`")
    table = _toml(tail)
    _check_keys(table, frozenset({"operator", "ed25519"}), "the signature")
    try:
        signature = base64.b64decode(_get(table, "ed25519", str), validate=True)
    except (ValueError, binascii.Error):
        raise RosterError("the roster's signature is not base64") from None
    if _get(table, "operator", str) != operator_key.hex():
        raise RosterError(
            "the roster is signed by another operator",
            hint="compare the operator's public key in convoy.toml with the roster's last lines",
        )
    try:
        verify(operator_key, signature, _LABEL + body)
    except HandshakeError:
        raise RosterError(
            "the roster was changed after it was signed", hint="fetch it again, or sign it again"
        ) from None
    return body


def _parse(body: bytes) -> Roster:
    table = _toml(body)
    _check_keys(table, _ROSTER_KEYS, "the roster")
    if _get(table, "format", int) != FORMAT:
        raise RosterError(f"the roster has format {table['format']}, expected {FORMAT}")
    members = _get(table, "members", list)
    roster = Roster(
        cluster_id=_get(table, "cluster_id", str),
        epoch=_get(table, "epoch", int),
        not_before=_time(table, "not_before"),
        expires=_time(table, "expires"),
        members=tuple(member_from_table(member) for member in members[: MAX_MEMBERS + 1]),
    )
    _check(roster)
    return roster


def _check(roster: Roster) -> None:
    if not _NAME.fullmatch(roster.cluster_id):
        raise RosterError(
            f"{roster.cluster_id!r} cannot name a cluster: 1 to 63 letters, digits, dots, dashes, underscores"
        )
    if not 1 <= roster.epoch < 2**63:
        raise RosterError(f"the roster has epoch {roster.epoch}, expected 1 or more")
    for at in (roster.not_before, roster.expires):
        if at < _FIRST_TIME or at.microsecond:
            raise RosterError(f"the roster names the time {at}, expected whole seconds from 1970 on")
    if not roster.not_before < roster.expires:
        raise RosterError("the roster expires before it is valid")
    if not 1 <= len(roster.members) <= MAX_MEMBERS:
        raise RosterError(f"the roster lists {len(roster.members)} members, expected 1 to {MAX_MEMBERS}")
    for member in roster.members:
        check_member(member)
    _check_distinct(roster, "name", [member.name for member in roster.members])
    _check_distinct(roster, "identity key", [member.identity_key for member in roster.members])
    _check_distinct(roster, "TLS key", [certificate_key(m.certificate_der) for m in roster.members])
    tls_keys = {certificate_key(member.certificate_der) for member in roster.members}
    for member in roster.members:
        if member.identity_key in tls_keys:
            raise RosterError(f"the identity key of {member.name} is another member's TLS key")
    if not any(member.head for member in roster.members):
        raise RosterError("the roster lists no member that may be head", hint="give one of them --head")


def _check_distinct(roster: Roster, what: str, values: list[Any]) -> None:
    for index, value in enumerate(values):
        first = values.index(value)
        if first != index:
            names = f"{roster.members[first].name} and {roster.members[index].name}"
            raise RosterError(f"the roster lists the same {what} twice: {names}")


def _body(roster: Roster) -> bytes:
    lines = (
        "# Convoy roster. Signed: a change by hand breaks the signature; use `convoy roster`.\n"
        f"format = {FORMAT}\n"
        f'cluster_id = "{roster.cluster_id}"\n'
        f"epoch = {roster.epoch}\n"
        f"not_before = {roster.not_before.astimezone(datetime.UTC).strftime(_TIME)}\n"
        f"expires = {roster.expires.astimezone(datetime.UTC).strftime(_TIME)}\n"
    )
    return (lines + "".join("\n[[members]]\n" + member_to_toml(m) for m in roster.members)).encode()


def _toml(data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError):  # not only TOMLDecodeError: int() refuses a number of 4,301 digits
        raise RosterError("the roster is not TOML") from None


def _check_keys(table: Mapping[str, Any], expected: frozenset[str], what: str) -> None:
    for key in sorted(expected - table.keys()):
        raise RosterError(f"{what} has no {key}")
    for key in sorted(table.keys() - expected):
        raise RosterError(f"{what} has the unknown field {key[:63]!r}")


def _get(table: Mapping[str, Any], key: str, kind: type) -> Any:
    value = table[key]
    if type(value) is not kind:  # bool is an int to isinstance
        raise RosterError(f"{key} in the roster is a {type(value).__name__}, expected {kind.__name__}")
    if (
        kind is int and isinstance(value, int) and not -(2**63) <= value < 2**63
    ):  # a longer one cannot even be printed
        raise RosterError(f"{key} in the roster does not fit 64 bits")
    return value


def _time(table: Mapping[str, Any], key: str) -> datetime.datetime:
    value: datetime.datetime = _get(table, key, datetime.datetime)
    if value.tzinfo is None:
        raise RosterError(f"{key} in the roster has no time zone, expected UTC (Z)")
    try:
        return value.astimezone(datetime.UTC)
    except OverflowError:
        raise RosterError(f"{key} in the roster is a time outside the calendar") from None
