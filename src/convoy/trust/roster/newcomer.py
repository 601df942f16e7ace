"""Put a newcomer's card into a roster: one more member, or a known one at a new address."""

from __future__ import annotations

import datetime
from dataclasses import replace

from convoy.errors import RosterError
from convoy.transport.member import Member, Roster
from convoy.trust.roster.addresses import sharing_address
from convoy.trust.roster.roster import format_address, make_roster
from convoy.wire.messages.enrolment import EnrolmentCard, Refusal

# The newcomer's clock may be behind the operator's, and it must be able to use the roster at once.
SLACK = datetime.timedelta(minutes=10)


def roster_with(roster: Roster, card: EnrolmentCard, now: datetime.datetime) -> Roster:
    """Return the next epoch, with the newcomer in it.

    Raises `RosterError` for a card that no roster can hold, and for one with another member's address. A
    member that comes back with its identity keeps its name, its place and its rights; its address and
    certificate become those of the card.
    """
    other = whose_address(roster, card)
    if other is not None:
        where = format_address(card.address)
        raise RosterError(
            f"{card.name} asks for the address {where}, which is {other.name}'s",
            hint="on its machine: `convoy join - --port PORT` with another port, or --address HOST:PORT",
        )
    return make_roster(
        roster.cluster_id,
        _members(roster, card),
        epoch=roster.epoch + 1,
        not_before=now - SLACK,
        lifetime=roster.expires - roster.not_before,
    )


def why_not(roster: Roster, card: EnrolmentCard, now: datetime.datetime) -> Refusal | None:
    """Return why the card cannot come in, or None. A refusal does not use the invitation up."""
    # A member that comes back may keep its name.
    known = any(member.identity_key == card.identity_key for member in roster.members)
    if not known and any(member.name == card.name for member in roster.members):
        return Refusal.NAME_TAKEN
    if whose_address(roster, card) is not None:
        return Refusal.ADDRESS_TAKEN
    try:
        roster_with(roster, card, now)
    except RosterError:
        return Refusal.BAD_CARD
    return None


def whose_address(roster: Roster, card: EnrolmentCard) -> Member | None:
    """Return the other member at the card's host and port, or None."""
    others = (member for member in roster.members if member.identity_key != card.identity_key)
    asked = Member(card.name, card.identity_key, card.certificate_der, card.address)
    return next((other for other in others if sharing_address((other, asked))), None)


def _members(roster: Roster, card: EnrolmentCard) -> tuple[Member, ...]:
    for index, member in enumerate(roster.members):
        if member.identity_key == card.identity_key:
            # It keeps its place in the list and its rights.
            back = replace(member, address=card.address, certificate_der=card.certificate_der)
            return (*roster.members[:index], back, *roster.members[index + 1 :])
    newcomer = Member(card.name, card.identity_key, card.certificate_der, card.address)
    return (*roster.members, newcomer)
