"""The newest roster that this process accepted, and the links under it.

A roster comes from a file, from an operator's command or from another member; all go through `offer`.
Adopting one closes at once the links to members that are gone or changed. The other links receive the new
roster and live on. So a roster that one member sees reaches all members linked with it, and stops at
those that know it.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from convoy.errors import ConvoyError, FrameError, HandshakeError, RosterError
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember, Member, Roster

_log = logging.getLogger(__name__)

MAX_NEEDLESS_ROSTERS = 8

Clock = Callable[[], datetime.datetime]
Adopted = Callable[[Roster], None]


class Authority(Protocol):
    """Judge signed rosters, and remember the accepted ones. `trust.roster` has the real implementation."""

    def verify(self, signed: bytes) -> Roster:
        """Return the roster. Parse nothing of it before its signature holds. Raises `RosterError`."""

    def accept(self, signed: bytes, roster: Roster, source: str) -> None:
        """Remember the roster durably before anything follows from it. Raises `ConvoyError`.

        ``source`` says where it came from, for the audit log.
        """


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass(slots=True)
class _Standing:
    """Hold a link, and count the rosters it brought that were no news under our epoch at that time."""

    link: Link
    epoch: int = 0
    num_needless: int = 0


class Membership:
    """Keep the current roster and watch over the links. Thread-safe.

    ``current`` is a frozen snapshot: take one and use it for one purpose. ``now`` is the clock that
    decides validity. It is checked every ``check_every_s`` while links stand.
    """

    def __init__(
        self,
        me: LocalMember,
        signed: bytes,
        authority: Authority,
        *,
        now: Clock = utc_now,
        check_every_s: float = 1.0,
    ) -> None:
        self._me = me
        self._signed = signed
        self._authority = authority
        self._now = now
        self._check_every_s = check_every_s
        # One roster at a time: held while a roster is verified and stored.
        self._offering = threading.Lock()
        self._lock = threading.Lock()
        self._standing: list[_Standing] = []
        self._subscribers: list[Adopted] = []
        self._checking = False
        self._wake = threading.Event()

    @property
    def current(self) -> LocalMember:
        return self._me

    @property
    def name(self) -> str:
        return self._me.name

    @property
    def member(self) -> Member:
        """Return this process's own line of the roster."""
        return self._me.member

    @property
    def roster(self) -> Roster:
        return self._me.roster

    @property
    def signed(self) -> bytes:
        """Return the current roster as the operator signed it."""
        return self._signed

    def require_valid(self) -> None:
        """Raise `RosterError` if the current roster is not valid now."""
        self._me.roster.require_valid(self._now())

    def subscribe(self, callback: Adopted) -> Callable[[], None]:
        """Call ``callback`` with each roster that is adopted from now on. Return a function that ends
        this.
        """
        with self._lock:
            self._subscribers.append(callback)

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._subscribers:
                    self._subscribers.remove(callback)

        return unsubscribe

    def offer(self, signed: bytes, source: str) -> bool:
        """Adopt a newer roster. Return False if it is the current one.

        Raises `RosterError`, naming ``source``, for a roster that does not verify, is of another cluster,
        is older, differs at the same epoch, is not valid now, or does not list us. Storing it may raise
        as well.
        """
        return self._offer(signed, source, None)

    def attach(self, link: Link) -> None:
        """Watch over a new link, before it is started.

        Raises `HandshakeError`, and closes the link, if its peer is gone or changed since the handshake
        began.
        """
        with self._lock:
            roster = self._me.roster
            out = _why_not(link, roster) is not None
            if not out:
                self._standing = [standing for standing in self._standing if not standing.link.is_over]
                self._standing.append(_Standing(link))
                link.on_roster, link.on_over = self._received, self._wake.set
                self._watch()
        if out:
            self.require(link)
        # A newer roster was adopted since the handshake, so the peer may lack it.
        if link.facts.epoch != roster.epoch:
            link.post_roster(self._signed)

    def require(self, link: Link) -> None:
        """Check new connections of a standing link. Raises and closes as `attach` does."""
        reason = _why_not(link, self._me.roster)
        if reason is not None:
            link.revoke(reason)
            raise HandshakeError(f"{link.peer} is out: {reason}")

    def check(self) -> None:
        """Close all links if the roster has expired. A thread of its own calls this while links stand."""
        with self._lock:
            roster = self._me.roster
            self._standing = [standing for standing in self._standing if not standing.link.is_over]
            links = [standing.link for standing in self._standing]
        if links and self._now() >= roster.expires:
            reason = f"the roster of {roster.cluster_id} expired at {roster.expires:%Y-%m-%d %H:%M:%S} UTC"
            _log.error("%s: %d links are closed", reason, len(links))
            _revoke_all([(link, reason) for link in links])

    def _offer(self, signed: bytes, source: str, sender: Link | None) -> bool:
        with self._offering:
            roster = self._authority.verify(signed)
            if not self._is_news(roster, source):
                return False
            try:
                me = LocalMember(self._me.name, self._me.identity, roster)
            except RosterError:
                self._leave(roster, source)
                raise
            # Stored before it takes effect: after a crash an older roster must not count again.
            self._authority.accept(signed, roster, source)
            self._adopt(me, signed, sender)
        _log.info("roster epoch %d of %s adopted, from %s", roster.epoch, roster.cluster_id, source)
        return True

    def _is_news(self, roster: Roster, source: str) -> bool:
        ours = self._me.roster
        if roster.cluster_id != ours.cluster_id:
            raise RosterError(
                f"{source} offers a roster of {roster.cluster_id}, and this member is of {ours.cluster_id}"
            )
        if roster.epoch < ours.epoch:
            raise RosterError(
                f"{source} offers roster epoch {roster.epoch}, and this member accepted epoch {ours.epoch}"
            )
        if roster.epoch > ours.epoch:
            roster.require_valid(self._now())
            return True
        if roster.digest != ours.digest:
            error = RosterError(
                f"{source} offers another roster of the same epoch {ours.epoch}: digest "
                f"{roster.digest.hex()[:12]}, and this member's is {ours.digest.hex()[:12]}",
                hint="somebody signed two rosters with one epoch; make a new one with a higher epoch",
            )
            _log.error("%s", error.message)
            raise error
        return False

    def _adopt(self, me: LocalMember, signed: bytes, sender: Link | None) -> None:
        with self._lock:
            self._me, self._signed = me, signed
            standing = [one.link for one in self._standing if not one.link.is_over]
            subscribers = tuple(self._subscribers)
            ends = [(link, why) for link in standing if (why := _why_not(link, me.roster)) is not None]
        _revoke_all(ends)
        ended = {link for link, _ in ends}
        for link in standing:
            # The sender has this roster already.
            if link not in ended and link is not sender:
                link.post_roster(signed)
        for callback in subscribers:
            try:
                callback(me.roster)
            except ConvoyError as error:
                _log.error("roster epoch %d: %s", me.roster.epoch, error.message)
            except Exception:  # noqa: BLE001 - logged whole
                # A bug in one subscriber must not leave the others at the old roster, above all the
                # listener's trust anchors.
                _log.exception("roster epoch %d: a subscriber failed", me.roster.epoch)

    def _leave(self, roster: Roster, source: str) -> None:
        """Close every link: the operator has removed this member or changed its keys."""
        with self._lock:
            links = [one.link for one in self._standing if not one.link.is_over]
        _log.error("roster epoch %d, from %s, has no place for this member", roster.epoch, source)
        _revoke_all([(link, f"roster epoch {roster.epoch} has no place for {self.name}") for link in links])

    def _received(self, link: Link, signed: bytes) -> None:
        """Handle a roster from a link, on its receiver thread.

        Raises `FrameError` for a peer that keeps sending useless ones.
        """
        try:
            if signed != self._signed and self._offer(signed, link.peer, link):
                return
            why = "it is known here"
        except ConvoyError as error:
            _log.warning("a roster from %s was refused: %s", link.peer, error.message)
            why = error.message
        with self._lock:
            standing = next((one for one in self._standing if one.link is link), None)
            if standing is None:
                return
            # Counted per epoch, because rosters that cross each other on the way are no fault.
            if standing.epoch != self._me.roster.epoch:
                standing.epoch, standing.num_needless = self._me.roster.epoch, 0
            standing.num_needless += 1
            too_many = standing.num_needless > MAX_NEEDLESS_ROSTERS
        if too_many:
            raise FrameError(f"{link.peer} keeps sending rosters of no use; of the last one: {why}")

    def _watch(self) -> None:
        if not self._checking:
            self._checking = True
            threading.Thread(target=self._run, name=f"watch over {self.name}", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._check_every_s)
            self._wake.clear()
            self.check()
            with self._lock:
                if not self._standing:
                    self._checking = False
                    return


def _why_not(link: Link, roster: Roster) -> str | None:
    """Return why the peer of a link may not have it under ``roster``, or None."""
    before = link.facts.member
    now = next((member for member in roster.members if member.name == before.name), None)
    if now is None:
        return f"roster epoch {roster.epoch} does not list {before.name}"
    if (now.identity_key, now.certificate_der) != (before.identity_key, before.certificate_der):
        return f"roster epoch {roster.epoch} lists other keys for {before.name}"
    if before.head and not now.head:
        return f"roster epoch {roster.epoch} does not allow {before.name} as head any more"
    return None


def _revoke_all(ends: list[tuple[Link, str]]) -> None:
    """Revoke all links at once without waiting, so that a peer that does not hang up delays no other."""
    for link, reason in ends:
        link.dismiss(reason, revoke=True)
