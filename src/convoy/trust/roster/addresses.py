"""Check that every member of a roster can be reached at an address of its own.

Signers check this before they sign. A roster that was signed before is not checked: members must still be
able to read it, and operators to mend it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from convoy.errors import RosterError
from convoy.transport.member import Member
from convoy.trust.roster.text import format_address


def check_own_addresses(members: Iterable[Member]) -> None:
    """Raise `RosterError` if two members are to be reached at one host and port."""
    for first, other in sharing_address(members):
        raise RosterError(
            f"{first.name} and {other.name} both have the address {format_address(other.address)}",
            hint=f"give {other.name} a HOST:PORT of its own: `convoy identity new {other.name} --address "
            f"HOST:PORT` with a new --dir; if it is listed, `convoy roster remove {other.name}` comes first",
        )


def sharing_address(members: Iterable[Member]) -> list[tuple[Member, Member]]:
    """Return each member with the host and port of an earlier one, behind that one."""
    seen: dict[tuple[str, int], Member] = {}
    pairs = [(seen.setdefault(_place(member), member), member) for member in members]
    return [(first, member) for first, member in pairs if first.name != member.name]


def _place(member: Member) -> tuple[str, int]:
    """Return one spelling of an address: host names have no case, and IPv6 has short forms."""
    host, port = member.address
    try:
        return str(ipaddress.ip_address(host)), port
    except ValueError:
        return host.lower().removesuffix("."), port
