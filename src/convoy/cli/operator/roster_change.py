"""Replace a roster by its successor: the same cluster, one epoch later, with the operator's signature."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli.audit import operator_log, roster_subject
from convoy.cli.operator.passphrase import Passphrase
from convoy.config.files import read_bytes, replace_file
from convoy.errors import ConfigError, IdentityError, RosterError

if TYPE_CHECKING:
    from convoy.crypto.identity import OperatorKey
    from convoy.transport.member import Member
    from convoy.trust.audit import AuditLog
    from convoy.trust.roster.operator import Handover
    from convoy.trust.roster.roster import SignedRoster

OPERATOR_DIRECTORY = Path(".convoy/operator")


@dataclass(frozen=True, slots=True)
class RosterChange:
    """Hold a change of a roster. The operator of ``key``, or a predecessor, signed ``old`` in ``file``."""

    file: Path
    old: SignedRoster
    key: OperatorKey
    handovers: tuple[Handover, ...]
    lifetime: datetime.timedelta
    audit: AuditLog

    def hand_over(self, new: OperatorKey, directory: Path) -> RosterChange:
        """Return this change with ``new``, the key in ``directory``, as the signer from now on.

        Raises `RosterError` if it is the same key, and `AuditError`.
        """
        from convoy.trust.roster.operator import make_handover

        roster = self.old.roster
        step = make_handover(roster.cluster_id, roster.epoch + 1, self.key, new)
        keys = {"old": step.old.hex(), "new": step.new.hex()}
        subject = {"cluster": step.cluster_id, "epoch": step.epoch, **keys}
        self.audit.append("hand over operator", subject)
        return replace(self, key=new, handovers=(*self.handovers, step), audit=operator_log(directory, new))

    def write(self, members: tuple[Member, ...]) -> SignedRoster:
        """Replace the file. Raises `RosterError` for members that make no valid roster, and `AuditError`."""
        from convoy.trust.roster.roster import sign_roster, verify_roster

        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        # The start time stays: a member with a slow clock must not delay the removal of another member.
        roster = replace(
            self.old.roster, epoch=self.old.roster.epoch + 1, expires=now + self.lifetime, members=members
        )
        data = sign_roster(roster, self.key, self.handovers)
        signed = verify_roster(data, operator_key=self.key.public_key)
        with self.audit.doing("sign roster", roster_subject(signed, self.file)):
            replace_file(self.file, data)
        return signed


def require_signer(signed: SignedRoster, key: OperatorKey) -> None:
    """Raise `RosterError` if ``key`` handed over to another key.

    Such a key can still read the roster, but no member accepts the next one from it.
    """
    if signed.operator != key.public_key:
        raise RosterError(
            f"operator {key.public_key.hex()[:16]}... handed over to {signed.operator.hex()[:16]}...",
            hint="name the new key's directory with --operator",
        )


def load_operator(directory: Path, passphrase_file: Path | None) -> OperatorKey:
    """Return the operator key in ``directory``. Raises `IdentityError` with a hint where a missing key may
    be.
    """
    try:
        return Passphrase(passphrase_file).load(directory)
    except IdentityError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise IdentityError(
            error.message,
            hint="the operator key is where the cluster's first roster was signed: run this there, or name "
            "the key's directory with --operator",
        ) from error


def open_change(file: Path, operator: Path, days: int, passphrase_file: Path | None) -> RosterChange:
    """Read the roster, and the key that may sign the next one. The roster may have expired.

    Raises `ConfigError`, `IdentityError` or `RosterError`.
    """
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, verify_roster

    key = load_operator(operator, passphrase_file)
    if not file.exists():
        raise ConfigError(f"there is no roster at {file}", hint="name the file with --roster")
    data = read_bytes(file, max_bytes=MAX_ROSTER_BYTES)
    old = verify_roster(data, operator_key=key.public_key)
    require_signer(old, key)
    lifetime = datetime.timedelta(days=days)
    return RosterChange(file, old, key, old.handovers, lifetime, operator_log(operator, key))
