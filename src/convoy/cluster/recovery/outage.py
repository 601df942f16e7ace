"""The log of one loss: how long it lasted, and each obstacle, told once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

# A member may word each error differently, so the number of texts is bounded.
_MAX_TOLD = 20
_PROGRESS_S = 5.0


class OutageLog:
    """Log one loss, from its discovery to the plan that runs, over all searches between.

    ``began_s`` is the time at which the loss was noticed, by the clock ``now``.
    """

    def __init__(self, began_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s = began_s
        self._found_s = self._said_s = now()
        self._told: set[str] = set()
        # Set once the bounded wait ended without a plan. Requests are refused until a member takes over.
        self.is_open_ended = False

    @property
    def lasts_s(self) -> float:
        return self._now() - self._began_s

    @property
    def found_after_s(self) -> float:
        """Return the seconds that it took to find out which member was lost."""
        return self._found_s - self._began_s

    def end(self, text: str) -> None:
        """Log the end as a warning, because the loss was one too and its readers want to know."""
        _log.warning("%s", text)

    def tell(self, text: str) -> None:
        """Log an obstacle, once for each text."""
        if text not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(text)
            _log.warning("%s", text)

    def wait(self, lost: str, why: str, wait_s: float) -> None:
        """Log that no connected member can hold the layers, which ones are awaited and for how long."""
        if self.is_open_ended:
            self.tell("waiting: any member that comes is used, however late")
        elif wait_s:
            self.tell(f"waiting: {'; '.join(filter(None, [lost, why]))}; for a member, at most {wait_s:g} s")

    def progress(self, text: str) -> None:
        """Log the progress of something that may take minutes, at most every 5 s."""
        if self._now() - self._said_s >= _PROGRESS_S:
            self._said_s = self._now()
            _log.warning("%s", text)
