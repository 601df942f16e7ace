"""Members for tests: identities on disk and a roster that lists them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from convoy.crypto.identity import Identity
from convoy.transport.member import LocalMember, Roster
from convoy.trust.card import member_of
from convoy.trust.roster import make_roster


def make_local_members(
    names: Sequence[str], directory: Path | None = None, *, cluster_id: str = "test", epoch: int = 1
) -> tuple[LocalMember, ...]:
    """Members of one roster, the first may be head; with a directory their keys are on disk, as TLS wants."""
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
    """The same member under another roster."""
    return LocalMember(member.name, member.identity, roster)


def shifted(roster: Roster, by: datetime.timedelta) -> Roster:
    """The same members, valid at another time."""
    return Roster(
        roster.cluster_id, roster.epoch, roster.not_before + by, roster.expires + by, roster.members
    )
