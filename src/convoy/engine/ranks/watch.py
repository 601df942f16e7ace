"""Who waits for another rank's part cannot look whether that rank still lives: so another thread does.

A rank that computes answers a ping meanwhile, from the threads of its links. One that hangs, or whose machine
is gone without a word, does not, and would be waited for until the deadline of the operation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from convoy.errors import CollectiveError, ConvoyError
from convoy.transport.link.link import Link

_log = logging.getLogger(__name__)

_LOOK_S = 0.25
_PING_S = 1.0
_MAX_SILENT = 2  # looks in a row: a machine may be busy for one


class RankWatch:
    """Told by the thread that runs orders, before and after each. ``abort`` is called with who is silent."""

    def __init__(self, links: Mapping[int, Link], abort: Callable[[ConvoyError], None]) -> None:
        self._links = links
        self._abort = abort
        self._since_s: float | None = None
        self._num_silent: dict[int, int] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="watch ranks", daemon=True).start()

    def begin(self) -> None:
        self._since_s = time.monotonic()

    def end(self) -> None:
        self._since_s = None

    def close(self) -> None:
        """Ends its thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            since_s = self._since_s
            if since_s is None or time.monotonic() - since_s < _LOOK_S:
                self._num_silent.clear()
                continue
            self._look()

    def _look(self) -> None:
        for rank, link in self._links.items():
            try:
                is_there = link.is_there(_PING_S)
            except ConvoyError:  # its link is over, and says so itself
                continue
            self._num_silent[rank] = 0 if is_there else self._num_silent.get(rank, 0) + 1
            if self._num_silent[rank] >= _MAX_SILENT and not self._closed.is_set():
                _log.warning("%s, rank %d of this stage, answers no ping", link.peer, rank)
                public = "a rank of a stage answers no ping"
                text = f"{link.peer}, rank {rank} of this stage, answers no ping"
                self._abort(CollectiveError(text, rank=rank, public=public))
                return
