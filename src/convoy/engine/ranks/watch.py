"""A thread that checks the other ranks while this rank waits for their parts and cannot check itself.

A rank that computes answers a ping meanwhile, from the threads of its links. A rank that hangs, or on a
machine that disappeared, does not, and would block the others until the operation's deadline.
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
# Unanswered pings in a row: a busy machine may miss one.
_MAX_SILENT = 2


class RankWatch:
    """Ping the other ranks while an order runs, and call ``abort`` with an error that names a silent rank.

    The thread that runs orders calls `begin` and `end` around each.
    """

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
        """End the thread."""
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
            # The link has ended, and reports that itself.
            except ConvoyError:
                continue
            self._num_silent[rank] = 0 if is_there else self._num_silent.get(rank, 0) + 1
            if self._num_silent[rank] >= _MAX_SILENT and not self._closed.is_set():
                _log.warning("%s, rank %d of this stage, answers no ping", link.peer, rank)
                public = "a rank of a stage answers no ping"
                text = f"{link.peer}, rank {rank} of this stage, answers no ping"
                self._abort(CollectiveError(text, rank=rank, public=public))
                return
