"""Judge rosters at one member: the operator key that it trusts, and the rosters accepted under it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from convoy.crypto.identity import Identity
from convoy.errors import AuditError, ConfigError, RosterError
from convoy.transport.member import LocalMember, Roster
from convoy.transport.membership import Clock, Membership, utc_now
from convoy.trust.audit import FILE, AuditLog
from convoy.trust.roster.accepted import Accepted, AcceptedFile
from convoy.trust.roster.roster import SignedRoster, verify_roster

_log = logging.getLogger(__name__)


class OperatorAuthority:
    """Trust one operator key; after a roster that a handed-over key signed, trust that key instead.

    ``file`` keeps the accepted state; without it nothing outlives this process.
    """

    def __init__(
        self,
        operator_key: bytes,
        file: AcceptedFile | None = None,
        *,
        configured: bytes | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self.trusted = operator_key
        self._configured = configured or operator_key
        self._file = file
        self._audit = audit

    def verify(self, signed: bytes) -> Roster:
        """Verify a roster: see `transport.membership.Authority`."""
        return verify_roster(signed, operator_key=self.trusted).roster

    def accept(self, signed: bytes, roster: Roster, source: str) -> None:
        """Accept a roster: see `transport.membership.Authority`."""
        operator = verify_roster(signed, operator_key=self.trusted).operator
        if self._file is not None:
            # It is saved before it counts, so that a crash in between forgets no accepted roster.
            self._file.save(Accepted(self._configured, operator, signed))
        self.trusted = operator
        self._log(roster, source)

    def _log(self, roster: Roster, source: str) -> None:
        """Log that the roster was accepted.

        A roster that cannot be logged counts all the same: it may be the one that removes a thief.
        """
        if self._audit is None:
            return
        subject = {"cluster": roster.cluster_id, "epoch": roster.epoch, "digest": roster.digest.hex()}
        try:
            self._audit.append("accept roster", {**subject, "operator": self.trusted.hex()}, origin=source)
        except AuditError as error:
            _log.error("roster epoch %d counts, and is not in the log: %s", roster.epoch, error.message)


@dataclass(frozen=True, slots=True)
class OpenedRoster:
    """Hold a membership at a start, and the notes for the operator about it."""

    membership: Membership
    notes: tuple[str, ...]


def open_membership(
    name: str,
    identity: Identity,
    signed: bytes,
    *,
    operator_key: bytes,
    file: AcceptedFile | None = None,
    now: Clock = utc_now,
) -> OpenedRoster:
    """Return this member under the newest roster it knows: ``signed``, or one that it accepted before.

    Raises `RosterError` or `IdentityError`.
    """
    accepted = file.load() if file is not None else None
    audit = None if file is None else AuditLog(file.identity / FILE, identity, f"member {name}")
    notes: tuple[str, ...] = ()
    if accepted is None:
        authority = OperatorAuthority(operator_key, file, audit=audit)
        newest = verify_roster(signed, operator_key=operator_key)
    else:
        trusted = _trusted(accepted, operator_key)
        authority = OperatorAuthority(trusted, file, configured=operator_key, audit=audit)
        newest, notes = _newer(
            authority, signed, verify_roster(accepted.signed, operator_key=authority.trusted)
        )
    # This check comes last: an expired file is no error if a newer roster was accepted before.
    newest.roster.require_valid(now())
    me = LocalMember(name, identity, newest.roster)
    if accepted is None or newest.raw != accepted.signed or operator_key != accepted.configured:
        authority.accept(newest.raw, newest.roster, "the roster file, at the start")
    return OpenedRoster(Membership(me, newest.raw, authority, now=now), notes)


def _trusted(accepted: Accepted, operator_key: bytes) -> bytes:
    # After a handover, convoy.toml may still name the old key. Any third key means another cluster.
    if operator_key not in (accepted.configured, accepted.trusted):
        raise ConfigError(
            f"convoy.toml names operator {operator_key.hex()[:16]}..., and this identity accepted rosters "
            f"of {accepted.trusted.hex()[:16]}...",
            hint="for another cluster make another identity: `convoy identity new`",
        )
    return accepted.trusted


def _newer(
    authority: OperatorAuthority, signed: bytes, known: SignedRoster
) -> tuple[SignedRoster, tuple[str, ...]]:
    """Return the file's roster if it is newer than the accepted one; otherwise the accepted one, and why."""
    ours = known.roster
    try:
        offered = verify_roster(signed, operator_key=authority.trusted)
    except RosterError as error:
        note = f"the roster file is refused: {error.message}; epoch {ours.epoch}, accepted before, counts"
        return known, (note,)
    theirs = offered.roster
    if theirs.cluster_id != ours.cluster_id:
        raise RosterError(
            f"the roster file is of cluster {theirs.cluster_id}, and this identity is of {ours.cluster_id}",
            hint="for another cluster make another identity: `convoy identity new`",
        )
    if theirs.epoch < ours.epoch:
        note = f"roster epoch {ours.epoch} counts, which came later than epoch {theirs.epoch} of the file"
        return known, (note,)
    # Two rosters of one epoch would split the cluster, so neither is chosen.
    if theirs.epoch == ours.epoch and offered.digest != known.digest:
        raise RosterError(
            f"the roster file is another roster of epoch {ours.epoch} than the one accepted before: digest "
            f"{offered.digest.hex()[:12]}, and {known.digest.hex()[:12]}",
            hint="somebody signed two rosters with one epoch; make a new one with a higher epoch",
        )
    return offered, ()
