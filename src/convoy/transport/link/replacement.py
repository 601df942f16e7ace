"""Replace the connections of a standing link before TLS has sealed too much under their keys.

The owners of links notice nothing. In the order of events:

1. The dialler, which sees how far both connections are used up, dials two new ones. Their
   handshake names the link that they are for.
2. The listener finds that link among its links with the same member, keeps the new connections for it, and
   confirms: SWITCH is its first sealed frame on them.
3. The dialler now commits: SWITCH is its last frame on the old connection to the listener.
4. The listener opens it, reads on from the new one, and does the same in its own direction.

A replacement that fails before step 3 costs nothing and is tried again. The failure is logged if the link
lives on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from convoy.errors import ConvoyError, FrameError, HandshakeError, LinkBroken, LinkClosed
from convoy.transport.link.incoming import Incoming, ReceivedMessage
from convoy.transport.link.outgoing import Outgoing
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.wire.messages.link import Switch

_log = logging.getLogger(__name__)

_SWITCH = frozenset({Switch.frame.type})


@dataclass(frozen=True, slots=True)
class Connections:
    """Hold the connections and keys of a finished handshake that are not in use yet."""

    link_id: bytes
    cipher: str
    streams: tuple[Stream, Stream]
    outgoing: Outgoing
    incoming: Incoming

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.outgoing.end(LinkBroken("these connections were not needed"))
        self.incoming.wipe()


class Replacement:
    """Replace one link's connections, at most one pair at a time.

    ``redial`` dials a new pair for this link; it is None at the listener. ``commit`` moves the link's own
    direction to a pair, by sending SWITCH.
    """

    def __init__(self, peer: str, options: LinkOptions, commit: Callable[[Connections], None]) -> None:
        self._peer = peer
        self._options = options
        self._commit = commit
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._running = False
        self._kept: Connections | None = None
        self.redial: Callable[[], Connections] | None = None

    def begin(self) -> None:
        """Start a replacement: a connection is used up. Never blocks, and does nothing while one is under
        way.
        """
        with self._lock:
            if self.redial is None or self._running or self._over.is_set():
                return
            self._running = True
        # The caller is sending or receiving on this link, and a dial takes several round trips.
        threading.Thread(target=self._run, name=f"replace {self._peer}", daemon=True).start()

    def keep(self, fresh: Connections) -> None:
        """Hold ``fresh`` until the peer's SWITCH names it. Close a pair kept before: its dialler gave it
        up.

        Raises `LinkBroken` if the link is over; ``fresh`` is closed then.
        """
        with self._lock:
            over = self._over.is_set()
            old = fresh if over else self._kept
            if not over:
                self._kept = fresh
        if old is not None:
            old.close()
        if over:
            raise LinkBroken(f"the link to {self._peer} ended before its connections were replaced")

    def take(self, link_id: bytes) -> Connections:
        """Return the kept connections once the peer's SWITCH names them.

        Raises `FrameError` for any other name.
        """
        with self._lock:
            fresh = self._kept
            if fresh is None or fresh.link_id != link_id:
                raise FrameError(f"{self._peer} switched to connections that this end does not have")
            # The pair is in use from here on, so the next replacement may begin.
            self._kept = None
            self._running = False
            return fresh

    def end(self) -> None:
        """Stop replacing and close a kept pair: the link is over."""
        with self._lock:
            self._over.set()
            fresh, self._kept = self._kept, None
        if fresh is not None:
            fresh.close()

    # The dialler's thread for one replacement.

    def _run(self) -> None:
        redial = self.redial
        failed_s: float | None = None
        while redial is not None and not self._over.is_set():
            try:
                fresh = redial()
                # Nothing may switch to a pair before the listener has confirmed that it keeps it.
                self._confirm(fresh)
                self.keep(fresh)
                self._commit(fresh)
                return
            # The link is being closed, so there is nothing to replace.
            except LinkClosed:
                return
            except ConvoyError as error:
                failed_s = failed_s or time.monotonic()
                self._tell(error, failed_s)

    def _tell(self, error: ConvoyError, failed_s: float) -> None:
        """Wait until it is time to try again, then log the failure if it has lasted.

        A leaving peer refuses new connections before its goodbye is read here, so an early failure is not
        logged.
        """
        if self._over.wait(self._options.replace_retry_s):
            return
        if time.monotonic() - failed_s >= self._options.close_timeout_s:
            _log.warning("the link to %s needs new connections: %s", self._peer, error.message)

    def _confirm(self, fresh: Connections) -> None:
        """Wait until the listener confirms that it keeps the pair: only then may this end commit."""
        stream = fresh.streams[1]
        try:
            stream.set_deadline(time.monotonic() + self._options.handshake_timeout_s)
            received = fresh.incoming.receive(_SWITCH)
            stream.set_deadline(None)
            said = received.message if isinstance(received, ReceivedMessage) else None
            if not isinstance(said, Switch) or said.link_id != fresh.link_id:
                raise HandshakeError(f"{self._peer} keeps other connections than these")
        except BaseException:
            fresh.close()
            raise
