"""Check the facts of a roster, whichever key signed it: names, addresses, keys, times, and nothing twice."""

from __future__ import annotations

import datetime
import ipaddress
import re
from typing import Any

from convoy.crypto.certificate import certificate_key
from convoy.errors import IdentityError, RosterError
from convoy.transport.member import Member, Roster

MAX_MEMBERS = 1024
MAX_HOST = 253
MAX_ATTESTATION_KEY_BYTES = 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LABELS = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_SCOPE = re.compile(r"[A-Za-z0-9._-]{1,32}")
_FIRST_TIME = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def check_name(
    name: str,
    hint: str = "`convoy identity new NAME` makes keys and a card with another name",
    what: str = "member",
) -> None:
    """Check that ``name`` can name a member or provider, ``what``. Raises `RosterError` with ``hint``."""
    if not _NAME.fullmatch(name):
        raise RosterError(
            f"{name[:80]!r} cannot name a {what}: 1 to 63 letters, digits, dots, dashes or underscores",
            hint=hint,
        )


def check_member(member: Member) -> bytes:
    """Check that a member's facts can be right, and return its TLS key. Raises `RosterError`."""
    check_name(member.name)
    if len(member.identity_key) != 32:
        raise RosterError(
            f"{member.name} has an identity key of {len(member.identity_key)} bytes, expected 32"
        )
    host, port = member.address
    if not _is_host(host) or not 0 < port < 65536:
        raise RosterError(
            f"{member.name} has address {host[:MAX_HOST]}:{port}, expected a host and a port of 1 to 65535",
            hint="`convoy identity new NAME --address HOST:PORT` makes a card with another address",
        )
    try:
        tls_key = certificate_key(member.certificate_der)
    except IdentityError as error:
        raise RosterError(f"the certificate of {member.name} is unusable: {error.message}") from error
    if tls_key == member.identity_key:
        raise RosterError(
            f"{member.name} uses one key for its identity and for TLS, and they must differ",
            hint="make new keys for that member with `convoy identity new`",
        )
    if len(member.attestation_key) > MAX_ATTESTATION_KEY_BYTES:
        raise RosterError(
            f"{member.name} has an attestation key of {len(member.attestation_key)} bytes, "
            f"and the limit is {MAX_ATTESTATION_KEY_BYTES}"
        )
    return tls_key


def _is_host(host: str) -> bool:
    """Return whether sockets take ``host`` without a `UnicodeError`.

    It is an IPv6 address, or labels of 1 to 63 characters.
    """
    if ":" not in host:
        return len(host) <= MAX_HOST and _LABELS.fullmatch(host) is not None
    address, percent, scope = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _SCOPE.fullmatch(scope) is not None


def check_roster(roster: Roster) -> None:
    """Check that the facts of a roster can be right. Raises `RosterError`."""
    if not _NAME.fullmatch(roster.cluster_id):
        raise RosterError(
            f"{roster.cluster_id!r} cannot name a cluster: 1 to 63 letters, digits, dots, dashes, "
            "underscores",
            hint="choose another name: `convoy roster new NAME CARD...`",
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
    # Reading a certificate is the costly part. Each is read
    # once, because members can send old rosters to be judged.
    tls_keys = [check_member(member) for member in roster.members]
    _check_distinct(roster, "name", [member.name for member in roster.members])
    _check_distinct(roster, "identity key", [member.identity_key for member in roster.members])
    _check_distinct(roster, "TLS key", tls_keys)
    known = set(tls_keys)
    for member in roster.members:
        if member.identity_key in known:
            raise RosterError(f"the identity key of {member.name} is another member's TLS key")
    if not any(member.head for member in roster.members):
        raise RosterError(
            "the roster lists no member that may be head", hint="name one with --head, or keep one that may"
        )


def _check_distinct(roster: Roster, what: str, values: list[Any]) -> None:
    seen: dict[Any, int] = {}
    for index, value in enumerate(values):
        first = seen.setdefault(value, index)
        if first != index:
            names = f"{roster.members[first].name} and {roster.members[index].name}"
            raise RosterError(
                f"the roster lists the same {what} twice: {names}",
                hint="leave one of the two cards out, or make new keys with `convoy identity new`",
            )
