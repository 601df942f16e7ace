"""A running member looks at its roster file, so that an operator's change counts without a restart."""

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
    """Looks at ``path`` from construction to ``close``, and offers what is new there.

    What is refused is offered again every few seconds: it may become valid, or the disk may have room again.
    ``tell`` gets the text of each refusal, for a person; one that stays the same is said once. ``judged``:
    what the file held when it was refused before, and that was said.
    """

    def __init__(
        self,
        path: Path,
        membership: Membership,
        tell: Callable[[str], None] = lambda _text: None,
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
        self._seen: _Mark | None = None  # so that a change before the first look is seen
        self._refused: str | None = None
        self._again_s = math.inf
        self._thread = threading.Thread(target=self._run, name="roster file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Twice is allowed."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def look(self) -> None:
        """Offer the file if it is another one than at the last look, or was refused a while ago."""
        try:
            status = self._path.stat()
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            if mark == self._seen and self._clock() < self._again_s:
                return
            self._seen = mark
            with self._path.open("rb") as file:
                signed = file.read(MAX_ROSTER_BYTES + 1)
        except OSError:
            return  # gone for the moment: whoever replaces it is not done, and what was accepted counts
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
        # The kind, not the text, which may name the time: of one file, each is news once.
        if self._refused == (refused := f"{mark} {type(error).__name__}"):
            return
        self._refused = refused
        _log.warning("%s was not adopted: %s", self._path, error.message)
        self._tell(f"{self._path} was not adopted: {error.message}")

    def _run(self) -> None:
        while not self._closed.is_set():
            self.look()
            self._closed.wait(LOOK_EVERY_S)
