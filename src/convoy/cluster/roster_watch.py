"""Watch the roster file of a running member, so that an operator's change counts without a restart."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from convoy.errors import ConvoyError
from convoy.transport.membership import Membership
from convoy.trust.roster.roster import MAX_ROSTER_BYTES

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
TRY_AGAIN_S = 10.0
_Mark = tuple[int, int, int]


class RosterWatch:
    """Watch ``path`` from construction to ``close``, and offer each new content.

    A refused roster is offered again every few seconds: it may become valid, or the disk may have room
    again. ``tell`` gets the text of each refusal, for a person; an unchanged one is told once. ``judged``
    is a content that was refused and reported before.
    """

    def __init__(
        self,
        path: Path,
        membership: Membership,
        tell: Callable[[str], None] = _log.warning,
        *,
        judged: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._membership = membership
        self._tell = tell
        self._judged = judged
        self._closed = threading.Event()
        self._clock = clock
        # None, so that a change before the first look is seen.
        self._seen: _Mark | None = None
        self._refused: str | None = None
        self._again_s = math.inf
        self._thread = threading.Thread(target=self._run, name="roster file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def look(self) -> None:
        """Offer the file if it changed since the last look, or was refused a while ago."""
        try:
            status = self._path.stat()
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            if mark == self._seen and self._clock() < self._again_s:
                return
            self._seen = mark
            with self._path.open("rb") as file:
                signed = file.read(MAX_ROSTER_BYTES + 1)
        except OSError:
            # The file is gone for the moment because it is being replaced. The accepted roster still
            # counts.
            return
        self._again_s = math.inf
        if signed in (self._membership.signed, self._judged):
            return
        try:
            self._membership.offer(signed, str(self._path))
            self._refused = None
        except ConvoyError as error:
            self._again_s = self._clock() + TRY_AGAIN_S
            self._say(error, mark)

    def _say(self, error: ConvoyError, mark: _Mark) -> None:
        # Compare the kind of error, because its text may name the time. Each kind is told once for a file.
        if self._refused == (refused := f"{mark} {type(error).__name__}"):
            return
        self._refused = refused
        self._tell(f"{self._path} was not adopted: {error.message}")

    def _run(self) -> None:
        while not self._closed.is_set():
            self.look()
            self._closed.wait(LOOK_EVERY_S)
