"""A roster that is replaced by its successor: the same cluster, one epoch later, signed by who may."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli.files import read_bytes, replace_file
from convoy.errors import ConfigError, IdentityError, RosterError

if TYPE_CHECKING:
    from convoy.crypto.identity import OperatorKey
    from convoy.transport.member import Member
    from convoy.trust.operator import Handover
    from convoy.trust.roster import SignedRoster

OPERATOR_DIRECTORY = Path(".convoy/operator")


@dataclass(frozen=True, slots=True)
class RosterChange:
    """``old`` is in ``file`` and was signed by ``key``'s operator, or by one who handed over to it."""

    file: Path
    old: SignedRoster
    key: OperatorKey
    handovers: tuple[Handover, ...]
    lifetime: datetime.timedelta

    def hand_over(self, new: OperatorKey) -> RosterChange:
        """From this change on ``new`` signs. Raises `RosterError` if it is the same key."""
        from convoy.trust.operator import make_handover

        roster = self.old.roster
        step = make_handover(roster.cluster_id, roster.epoch + 1, self.key, new)
        return replace(self, key=new, handovers=(*self.handovers, step))

    def write(self, members: tuple[Member, ...]) -> SignedRoster:
        """Replace the file. Raises `RosterError` for members that make no roster."""
        from convoy.trust.roster import sign_roster, verify_roster

        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        # Its beginning stays: a member whose clock is behind must not put off who is out.
        roster = replace(
            self.old.roster, epoch=self.old.roster.epoch + 1, expires=now + self.lifetime, members=members
        )
        data = sign_roster(roster, self.key, self.handovers)
        replace_file(self.file, data)
        return verify_roster(data, operator_key=self.key.public_key)


def require_signer(signed: SignedRoster, key: OperatorKey) -> None:
    """A key that handed over can still read the roster, but no member takes the next one from it.

    Raises `RosterError`.
    """
    if signed.operator != key.public_key:
        raise RosterError(
            f"operator {key.public_key.hex()[:16]}... handed over to {signed.operator.hex()[:16]}...",
            hint="name the new key's directory with --operator",
        )


def load_operator(directory: Path) -> OperatorKey:
    """The operator key in ``directory``. Raises `IdentityError`, with where else to look if there is none."""
    from convoy.crypto.identity import OperatorKey

    try:
        return OperatorKey.load(directory)
    except IdentityError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise IdentityError(
            error.message,
            hint="the operator key is where the cluster's first roster was signed: run this there, or name "
            "the key's directory with --operator",
        ) from error


def open_change(file: Path, operator: Path, days: int) -> RosterChange:
    """Read the roster and the key that may sign the next one; an expired roster may be followed too.

    Raises `ConfigError`, `IdentityError` or `RosterError`.
    """
    from convoy.trust.roster import MAX_ROSTER_BYTES, verify_roster

    key = load_operator(operator)
    if not file.exists():
        raise ConfigError(f"there is no roster at {file}", hint="name the file with --roster")
    data = read_bytes(file, max_bytes=MAX_ROSTER_BYTES)
    old = verify_roster(data, operator_key=key.public_key)
    require_signer(old, key)
    return RosterChange(file, old, key, old.handovers, datetime.timedelta(days=days))
