"""The pings of one link: the callers that wait for answers, and unasked signs of life."""

from __future__ import annotations

import contextlib
import threading
import time

from convoy.errors import ConvoyError, LinkBroken, PeerUnreachable
from convoy.transport.link.outgoing import Outgoing, OutgoingFrame, message_frame
from convoy.wire.messages.link import Ping, Pong

# The token of a PONG that answers no ping.
_ASKED_BY_NOBODY = -1


class Pings:
    """Send pings and match their answers.

    Thread-safe; the sender thread writes, so no caller waits for a write.
    """

    def __init__(self, peer: str, outgoing: Outgoing) -> None:
        self._peer = peer
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._next = 0

    def ask(self, timeout_s: float) -> float:
        """Return the round trip in seconds. Raises `PeerUnreachable` after ``timeout_s``, or `LinkBroken`."""
        waiting = _Waiting()
        with self._lock:
            token = self._take_token()
            self._waiting[token] = waiting
        deadline_s = time.monotonic() + timeout_s
        try:
            started_s = time.perf_counter()
            queued = self._outgoing.post(_ping(token), deadline_s)
            if not queued or not waiting.event.wait(max(0.0, deadline_s - time.monotonic())):
                raise PeerUnreachable(f"{self._peer} did not answer a ping within {timeout_s:g} s")
            if waiting.at_s is None:
                raise LinkBroken(f"the link to {self._peer} ended before it answered a ping")
            return waiting.at_s - started_s
        finally:
            with self._lock:
                self._waiting.pop(token, None)

    def send(self) -> None:
        """Send a ping so that the peer answers. No caller waits for the answer."""
        with self._lock:
            token = self._take_token()
        # An error means that the link is over, which its owner hears through ``ended``.
        with contextlib.suppress(ConvoyError):
            self._outgoing.post(_ping(token), 0.0)

    def answer(self, token: int) -> None:
        """Answer a ping of the peer."""
        self._outgoing.post_pong(_pong(token))

    def say_alive(self) -> None:
        """Send a sign of life while this end does not read the peer's pings."""
        self._outgoing.post_pong(_pong(_ASKED_BY_NOBODY))

    def answered(self, token: int) -> None:
        """Record an answer. A token without a waiting caller is a sign of life, and is ignored here."""
        with self._lock:
            waiting = self._waiting.get(token)
        if waiting is not None:
            waiting.at_s = time.perf_counter()
            waiting.event.set()

    def end(self) -> None:
        """Wake every waiting caller: no answer will come."""
        with self._lock:
            waiting = list(self._waiting.values())
        for one in waiting:
            one.event.set()

    def _take_token(self) -> int:
        self._next += 1
        return self._next - 1


class _Waiting:
    """Represent a ping that is under way."""

    __slots__ = ("at_s", "event")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.at_s: float | None = None


def _ping(token: int) -> OutgoingFrame:
    return message_frame(Ping(token))


def _pong(token: int) -> OutgoingFrame:
    return message_frame(Pong(token))
