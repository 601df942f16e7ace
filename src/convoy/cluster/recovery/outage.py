"""What is told of one loss: how long it lasted, and each thing that stands in the way, once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

_MAX_TOLD = 20  # a member's words may differ each time
_PROGRESS_S = 5.0


class OutageLog:
    """From the loss to the plan that runs, however many searches were in vain between.

    ``began_s``: when it was noticed, by the clock ``now``.
    """

    def __init__(self, began_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s = began_s
        self._found_s = self._said_s = now()
        self._told: set[str] = set()
        self.is_open_ended = False  # nobody took over in time: until somebody does, requests are refused

    @property
    def lasts_s(self) -> float:
        return self._now() - self._began_s

    @property
    def found_after_s(self) -> float:
        """How long it took to find out what was lost."""
        return self._found_s - self._began_s

    def end(self, text: str) -> None:
        """As loud as the loss: whoever read of that wants to know."""
        _log.warning("%s", text)

    def tell(self, text: str) -> None:
        """Of what stands in the way. The same only once."""
        if text not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(text)
            _log.warning("%s", text)

    def wait(self, lost: str, why: str, wait_s: float) -> None:
        """Nobody who is here can hold the layers: say for whom and how long, in either kind of search."""
        if self.is_open_ended:
            self.tell("waiting: whoever comes is used, however late")
        elif wait_s:
            self.tell(f"waiting: {'; '.join(filter(None, [lost, why]))}; for a member, at most {wait_s:g} s")

    def progress(self, text: str) -> None:
        """Of something that may take minutes: not more often than every 5 s."""
        if self._now() - self._said_s >= _PROGRESS_S:
            self._said_s = self._now()
            _log.warning("%s", text)
