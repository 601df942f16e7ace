"""Members for tests: identities on disk and a roster that lists them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from convoy.crypto.identity import Identity, OperatorKey
from convoy.transport.member import LocalMember, Roster
from convoy.transport.membership import Membership
from convoy.trust.roster.authority import OperatorAuthority
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster

OPERATOR = OperatorKey.generate()


def make_local_members(
    names: Sequence[str], directory: Path | None = None, *, cluster_id: str = "test", epoch: int = 1
) -> tuple[LocalMember, ...]:
    """Return members of one roster; the first may be head. With a directory their keys are on disk, for
    TLS.
    """
    identities = {}
    for name in names:
        identities[name] = Identity.generate()
        if directory is not None:
            identities[name].save(directory / name)
    members = [
        member_of(name, identity, ("127.0.0.1", 7000 + i), head=i == 0)
        for i, (name, identity) in enumerate(identities.items())
    ]
    roster = make_roster(cluster_id, members, epoch=epoch)
    return tuple(LocalMember(name, identities[name], roster) for name in names)


def with_roster(member: LocalMember, roster: Roster) -> LocalMember:
    """Return the same member under another roster."""
    return LocalMember(member.name, member.identity, roster)


def shifted(roster: Roster, by: datetime.timedelta) -> Roster:
    """Return the same members with another time of validity."""
    return Roster(
        roster.cluster_id, roster.epoch, roster.not_before + by, roster.expires + by, roster.members
    )


def membership_of(me: LocalMember, **options: Any) -> Membership:
    """Return the membership of a running process. `OPERATOR` signed its roster and may sign newer ones."""
    return Membership(me, sign_roster(me.roster, OPERATOR), OperatorAuthority(OPERATOR.public_key), **options)


def later(roster: Roster, *, without: Sequence[str] = (), epoch: int = 1) -> bytes:
    """Return the roster ``epoch`` epochs later, without some members, signed by `OPERATOR`."""
    members = tuple(member for member in roster.members if member.name not in without)
    return sign_roster(replace(roster, epoch=roster.epoch + epoch, members=members), OPERATOR)
