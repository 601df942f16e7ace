"""Hold the sessions that tokens of ``convoy open`` began. A restart of the head ends them all."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from convoy.api.page.tokens import Scope

SESSION_LIFE_S = 12 * 3600.0
_MAX_SESSIONS = 64
_MAX_SECRET_CHARS = 64


@dataclass(frozen=True, slots=True)
class PageSession:
    """Hold a person's session: what it may do, and until when on the clock of `Sessions`."""

    scope: Scope
    ends_s: float


class Sessions:
    """Hold sessions by the hash of their secret, on the event loop's thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, max_sessions: int = _MAX_SESSIONS
    ) -> None:
        self._clock = clock
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[bytes, PageSession] = OrderedDict()

    def begin(self, scope: Scope) -> str:
        """Return the secret of a new session. Beyond the most sessions, the oldest one ends."""
        self._expire()
        secret = secrets.token_urlsafe(32)
        self._sessions[_digest(secret)] = PageSession(scope, self._clock() + SESSION_LIFE_S)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return secret

    def find(self, secret: str) -> PageSession | None:
        """Return the session with that secret, or None if there is none or it has expired."""
        found = self._sessions.get(_digest(secret))
        return found if found is not None and self._clock() < found.ends_s else None

    def end(self, secret: str) -> None:
        """End one session. A session that is over changes nothing."""
        self._sessions.pop(_digest(secret), None)

    def end_all(self) -> int:
        """End every session, and return how many there were."""
        self._expire()
        number = len(self._sessions)
        self._sessions.clear()
        return number

    def _expire(self) -> None:
        now_s = self._clock()
        for digest in [one for one, session in self._sessions.items() if now_s >= session.ends_s]:
            del self._sessions[digest]


def _digest(secret: str) -> bytes:
    # A secret is shorter than this. A longer text never matches, and costs no more to hash.
    return hashlib.sha256(secret[: _MAX_SECRET_CHARS + 1].encode()).digest()
