"""The operator's files: its key, the newest roster, and the records of used invitations."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli.audit import operator_log
from convoy.cli.operator.roster_change import load_operator
from convoy.cli.show.output import one_line, print_note
from convoy.config.files import read_bytes
from convoy.config.settings import Config, load_config
from convoy.errors import ConfigError

if TYPE_CHECKING:
    from convoy.crypto.identity import OperatorKey
    from convoy.transport.member import Roster
    from convoy.trust.audit import AuditLog
    from convoy.trust.consumption import Consumption
    from convoy.trust.invite import Token
    from convoy.trust.roster.roster import SignedRoster
    from convoy.wire.messages.enrolment import EnrolmentCard, Refusal


@dataclass(frozen=True, slots=True)
class OperatorFiles:
    """Hold the operator's key, settings, records of used invitations, and audit log."""

    key: OperatorKey
    settings: Config
    records: Path
    audit: AuditLog

    @classmethod
    def open(cls, config: Path, operator: Path, passphrase_file: Path | None) -> OperatorFiles:
        settings = load_config(config)
        key = load_operator(operator, passphrase_file)
        files = cls(key, settings, operator / "invites", operator_log(operator, key))
        if files.newest().operator != files.key.public_key:
            raise ConfigError(
                f"the operator key in {operator} is not the one that signed {files.roster_file}",
                hint="name the key's directory with --operator",
            )
        return files

    @property
    def roster_file(self) -> Path:
        return self.settings.require_roster()

    def roster(self) -> Roster:
        return self.newest().roster

    def newest(self) -> SignedRoster:
        """Return the file's roster, or a newer one that this machine accepted from others.

        The roster may have expired: its successor may still follow it. Read it anew each time, because
        another process may have signed a new one.
        """
        from convoy.trust.roster.accepted import AcceptedFile
        from convoy.trust.roster.roster import MAX_ROSTER_BYTES, verify_roster

        data = read_bytes(self.roster_file, max_bytes=MAX_ROSTER_BYTES)
        newest = verify_roster(data, operator_key=self.settings.require_operator_key())
        identity = self.settings.cluster.identity
        accepted = AcceptedFile(identity).load() if identity is not None else None
        if accepted is not None:
            other = verify_roster(accepted.signed, operator_key=accepted.trusted)
            same = other.roster.cluster_id == newest.roster.cluster_id
            if same and other.roster.epoch > newest.roster.epoch:
                return other
        return newest

    def judge(self, card: EnrolmentCard) -> Refusal | None:
        """Return the reason to refuse a newcomer, or None. Print a note with the owner of an address that is
        taken.
        """
        from convoy.trust.roster.newcomer import whose_address, why_not
        from convoy.trust.roster.roster import format_address
        from convoy.wire.messages.enrolment import Refusal

        roster = self.roster()
        refusal = why_not(roster, card, datetime.datetime.now(datetime.UTC))
        other = whose_address(roster, card)
        if refusal is Refusal.ADDRESS_TAKEN and other is not None:
            where = format_address(card.address)
            print_note(
                f"{one_line(card.name)} was turned away: it asks for {where}, {other.name}'s address; the "
                f"invitation is still good"
            )
        return refusal

    def consumption(self, token: Token) -> Consumption:
        from convoy.trust.consumption import Consumption

        return Consumption(self.records, token.id)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the files in use while the block runs. The only user reports the traces of a crash, once."""
        with _lock(self.records, "desk") as descriptor:
            try:
                # The exclusive lock succeeds only if no other invitation is open.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Another invitation is open. Its unfinished work is not the trace of a crash.
                pass
            else:
                self._tell_unfinished()
            # A shared lock lets further invitations run beside this one.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield

    @contextmanager
    def signing(self) -> Iterator[None]:
        """Lock the roster while the block runs, so that two invitations never sign the same epoch twice."""
        with _lock(self.records, "signing") as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def _tell_unfinished(self) -> None:
        """Report an earlier process that ended between the use of an invitation and the new roster, once."""
        from convoy.trust.consumption import forget, unfinished

        for who in unfinished(self.records):
            print_note(
                f"note: an earlier invitation was used up by {one_line(who)}, and its process ended before "
                f"it was answered; {self.roster_file} says whether that member is in"
            )
        forget(self.records)


@contextmanager
def _lock(directory: Path, name: str) -> Iterator[int]:
    from convoy.crypto.keyfile import make_private_directory

    make_private_directory(directory)
    descriptor = os.open(directory / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        # Closing releases the lock, as the end of the process does.
        os.close(descriptor)
