"""The traffic over a member's links, ended links included: sums that never fall."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from convoy.errors import ConvoyError, LinkClosed
from convoy.transport.link.link import Link


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """Count the traffic with one other member. Bytes are of sealed frames; a hop is a hidden state."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_hops: int = 0
    received_hops: int = 0
    # Links that ended and were not closed here.
    broken: int = 0


class Traffic:
    """Sum traffic by member. Thread-safe. Only members of a roster count, so they are few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._past: dict[str, PeerTraffic] = {}

    def began(self, link: Link) -> None:
        """Add a link that was started, or is about to be."""
        with self._lock:
            self._links.add(link)

    def ended(self, link: Link, error: ConvoyError) -> None:
        """Keep the sums of a link that ended. ``error`` is the error that ended it."""
        with self._lock:
            if link in self._links:
                self._links.discard(link)
                past = self._past.get(link.peer, PeerTraffic())
                self._past[link.peer] = _plus(past, link, int(not isinstance(error, LinkClosed)))

    def by_peer(self) -> dict[str, PeerTraffic]:
        """Return the traffic up to now, by member."""
        with self._lock:
            found = dict(self._past)
            for link in self._links:
                found[link.peer] = _plus(found.get(link.peer, PeerTraffic()), link, 0)
        return found


def _plus(past: PeerTraffic, link: Link, broken: int) -> PeerTraffic:
    return PeerTraffic(
        past.sent_bytes + link.sent_sealed_bytes,
        past.received_bytes + link.received_sealed_bytes,
        past.sent_hops + link.sent_hops,
        past.received_hops + link.received_hops,
        past.broken + broken,
    )
