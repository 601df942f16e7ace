"""A liveness probe of a peer that must answer: it watches the traffic on the link, then sends a ping.

A peer that reads or writes much over a slow link is not lost, and its answer to a ping may stand behind the
very tensor that the head waits for. So any traffic counts as life, and the peer is pinged only if there is
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from convoy.errors import ConvoyError, PeerUnreachable
from convoy.transport.link.link import Link

_QUIET_S = 0.5
_PING_S = 1.0
# Fewer sent bytes may be the probe's own pings.
_PING_BYTES = 4096
# Sent bytes that the system may still hold, and that a ping stands behind.
_BUFFERED_BYTES = 4 * 1024 * 1024


class LivenessProbe:
    """Watch one link during one exchange, from one thread."""

    def __init__(
        self, link: Link, *, extra_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._link = link
        self._ping_s = _PING_S + extra_s
        self._now = now
        self._sent, self._received = link.sent_sealed_bytes, link.received_sealed_bytes
        self._alive_s = now()

    def is_gone(self) -> bool:
        """Return whether the peer is gone.

        If nothing moves for half a second, the call takes as long as a ping.
        """
        if self._moves() or self._now() - self._alive_s < _QUIET_S:
            return False
        try:
            self._link.ping(self._ping_s)
        except PeerUnreachable:
            return not self._moves()
        # The link has ended, and the waiting thread is told.
        except ConvoyError:
            return False
        self._alive_s = self._now()
        return False

    def _moves(self) -> bool:
        sent, received = self._link.sent_sealed_bytes, self._link.received_sealed_bytes
        if received == self._received and sent - self._sent < _PING_BYTES:
            return False
        self._sent, self._received, self._alive_s = sent, received, self._now()
        return True


def drain_s(num_bytes: int, took_s: float) -> float:
    """Return how many seconds the system may need for the bytes it still holds.

    ``num_bytes`` were handed to it in ``took_s`` seconds.
    """
    return took_s * min(1.0, _BUFFERED_BYTES / max(1, num_bytes))
