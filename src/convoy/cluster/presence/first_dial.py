"""The first dial of all members of the roster: all at once, each for as long as the head waits."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.errors import HandshakeLate, PeerUnreachable
from convoy.transport.link.link import Link
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.transport.network import Network

# The member that came, the names that are still missing, and the seconds left for them.
Arrival = Callable[[str, list[str], float], None]

_RETRY_S = 0.2
DIAL_S = 5.0


@dataclass(slots=True)
class DialResults:
    """Hold the links of the members that came, and the errors of the dials to the others."""

    links: dict[str, Link] = field(default_factory=dict)
    absent: dict[str, PeerUnreachable] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Absent:
    """Mark a dial that failed. ``watch`` may raise `PeerUnreachable` too, and that ends the whole call."""

    error: PeerUnreachable


class FirstDial:
    """Dial every member of the roster once.

    ``watch`` is called between dials; an error that it raises ends them all. `call` runs ``on_link`` and
    ``on_arrival`` on its own thread as soon as a member comes: a link that is not read would end before
    the other members are there.
    """

    def __init__(
        self,
        me: Membership,
        network: Network,
        wait_s: float,
        watch: Callable[[], None],
        *,
        on_link: Callable[[Link], None],
        on_arrival: Arrival = lambda *_: None,
    ) -> None:
        self._me = me
        self._network = network
        self._wait_s = wait_s
        self._watch = watch
        self._on_link = on_link
        self._on_arrival = on_arrival
        self._over = threading.Event()

    def call(self) -> DialResults:
        """Return the links, and the members that did not answer in time.

        Raises the first other error of a dial.
        """
        peers = [member for member in self._me.roster.members if member.name != self._me.name]
        ended: queue.SimpleQueue[tuple[str, Link | _Absent | BaseException | None]] = queue.SimpleQueue()
        found = DialResults()
        missing = [member.name for member in peers]
        deadline_s = time.monotonic() + self._wait_s

        def reach(member: Member) -> None:
            try:
                ended.put((member.name, self._dial_until(member)))
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                ended.put((member.name, error))

        try:
            # Dial all at once, because each absent member takes the whole wait.
            for member in peers:
                threading.Thread(
                    target=reach, args=(member,), name=f"dial {member.name}", daemon=True
                ).start()
            for _ in peers:
                name, outcome = ended.get()
                missing.remove(name)
                self._note(found, name, outcome)
                if name in found.links:
                    self._on_link(found.links[name])
                    self._on_arrival(name, list(missing), max(0.0, deadline_s - time.monotonic()))
        except BaseException:
            self._over.set()
            for link in found.links.values():
                link.dismiss("the head gave up on another member")
            raise
        return found

    def _note(self, found: DialResults, name: str, outcome: Link | _Absent | BaseException | None) -> None:
        if isinstance(outcome, _Absent):
            found.absent[name] = outcome.error
        elif isinstance(outcome, BaseException):
            raise outcome
        elif outcome is not None:
            found.links[name] = outcome

    def _dial_until(self, member: Member) -> Link | _Absent | None:
        """Dial one member until the deadline. Returns None once the roster no longer lists it."""
        deadline = time.monotonic() + self._wait_s
        while True:
            self._watch()
            if all(listed.name != member.name for listed in self._me.roster.members):
                return None
            try:
                remaining = max(_RETRY_S, deadline - time.monotonic())
                link = self._network.dial(self._me, member, min(DIAL_S, remaining))
                if self._over.is_set():
                    link.close("the head gave up on another member")
                return link
            except (PeerUnreachable, HandshakeLate) as error:
                if time.monotonic() >= deadline or self._over.is_set():
                    return _Absent(self._unanswered(member, error))
                self._over.wait(_RETRY_S)

    def _unanswered(self, member: Member, error: PeerUnreachable | HandshakeLate) -> PeerUnreachable:
        host, port = member.address
        why = f": {error.message}" if isinstance(error, HandshakeLate) else ""
        return PeerUnreachable(
            f"{member.name} at {host}:{port} did not answer within {self._wait_s:g} s{why}",
            hint=f"run `convoy join` on {member.name}, mend its address in the roster, "
            f"or take it out: `convoy roster remove {member.name}`",
        )
