"""A running member looks at its roster file, so that an operator's change counts without a restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from convoy.errors import ConvoyError
from convoy.transport.membership import Membership
from convoy.trust.roster import MAX_ROSTER_BYTES

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
_Mark = tuple[int, int, int]


class RosterWatch:
    """Looks at ``path`` from construction to ``close``; what is new there is offered, and once only.

    ``tell`` gets the text of each refusal, for a person; a file that stays bad is named once.
    """

    def __init__(
        self, path: Path, membership: Membership, tell: Callable[[str], None] = lambda _text: None
    ) -> None:
        self._path = path
        self._membership = membership
        self._tell = tell
        self._closed = threading.Event()
        self._seen: _Mark | None = None  # so that a change before the first look is seen
        self._thread = threading.Thread(target=self._run, name="roster file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Twice is allowed."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def look(self) -> None:
        """Offer the file if it is another one than at the last look."""
        try:
            status = self._path.stat()
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            if mark == self._seen:
                return
            self._seen = mark
            with self._path.open("rb") as file:
                signed = file.read(MAX_ROSTER_BYTES + 1)
        except OSError:
            return  # gone for the moment: whoever replaces it is not done, and what was accepted counts
        if signed == self._membership.signed:
            return
        try:
            self._membership.offer(signed, str(self._path))
        except ConvoyError as error:
            _log.warning("%s was not adopted: %s", self._path, error.message)
            self._tell(f"{self._path} was not adopted: {error.message}")

    def _run(self) -> None:
        while not self._closed.is_set():
            self.look()
            self._closed.wait(LOOK_EVERY_S)
