"""Write and read a member card: the public facts of an identity as TOML, for the operator's roster."""

from __future__ import annotations

import tomllib
from dataclasses import replace

from convoy.crypto.identity import Identity
from convoy.errors import RosterError
from convoy.transport.member import Member
from convoy.trust.roster.roster import check_member, member_from_table, member_to_toml

_CARD = "`convoy identity new` writes a card: copy the whole file"

MAX_CARD_BYTES = 16 * 1024
_TABLE = "member"


def member_of(name: str, identity: Identity, address: tuple[str, int], *, head: bool = False) -> Member:
    """Return the public facts of an identity under a name and an address.

    Raises `RosterError` for an impossible one.
    """
    member = Member(name, identity.public_key, identity.tls_certificate_der, address, head)
    check_member(member)
    return member


def write_card(member: Member) -> str:
    """Return the card as text. It holds nothing secret, but must reach the operator unchanged."""
    return f"# Convoy member card: public facts, for `convoy roster`.\n[{_TABLE}]\n{member_to_toml(member)}"


def read_card(text: str, *, head: bool | None = None) -> Member:
    """Return the member on a card; ``head`` overrides the card's own. Raises `RosterError`."""
    if len(text) > MAX_CARD_BYTES:
        raise RosterError(
            f"a member card has {len(text)} characters, and the limit is {MAX_CARD_BYTES}", hint=_CARD
        )
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError):
        raise RosterError("the member card is not TOML", hint=_CARD) from None
    if set(table) != {_TABLE}:
        raise RosterError(f"the member card has no table [{_TABLE}], or others beside it", hint=_CARD)
    member = member_from_table(table[_TABLE])
    return member if head is None else replace(member, head=head)
