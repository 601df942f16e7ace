"""Whether a peer of which something is awaited is there at all: by what moves on its link, or by a ping.

A peer that reads or writes much over a slow link is not lost, and its answer to a ping may stand behind the
very tensor that is awaited; so whatever moves counts as life, and only where nothing does it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from convoy.errors import ConvoyError, PeerUnreachable
from convoy.transport.link.link import Link

_QUIET_S = 0.5
_PING_S = 1.0
_PING_BYTES = 4096  # fewer that were sent may be our own pings
_BUFFERED_BYTES = 4 * 1024 * 1024  # that the system may hold of what was sent, and a ping stands behind


class LivenessProbe:
    """Of one link, during one exchange. One thread looks at it."""

    def __init__(
        self, link: Link, *, patience_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._link = link
        self._ping_s = _PING_S + patience_s
        self._now = now
        self._sent, self._received = link.sent_sealed_bytes, link.received_sealed_bytes
        self._alive_s = now()

    def is_gone(self) -> bool:
        """Look. Where nothing moves for half a second, this takes as long as a ping."""
        if self._moves() or self._now() - self._alive_s < _QUIET_S:
            return False
        try:
            self._link.ping(self._ping_s)
        except PeerUnreachable:
            return not self._moves()
        except ConvoyError:  # the link is over, and whoever waits is told
            return False
        self._alive_s = self._now()
        return False

    def _moves(self) -> bool:
        sent, received = self._link.sent_sealed_bytes, self._link.received_sealed_bytes
        if received == self._received and sent - self._sent < _PING_BYTES:
            return False
        self._sent, self._received, self._alive_s = sent, received, self._now()
        return True


def patience_after(num_bytes: int, took_s: float) -> float:
    """How long it may take what the system still holds of ``num_bytes``, handed to it in ``took_s``."""
    return took_s * min(1.0, _BUFFERED_BYTES / max(1, num_bytes))
