"""Print one line when an answer pauses because the cluster is recovering, and nothing otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

QUIET_S = 2.0


class StallNotice:
    """Ask for the reason whenever `came` was not called for ``quiet_s``, from entry to exit of the block.

    ``reason`` returns the cause of the cluster's recovery, or None if it is not recovering. It may block for
    a moment. ``tell`` gets the cause once for each recovery. Both run on a thread of this object.
    """

    def __init__(
        self, reason: Callable[[], str | None], tell: Callable[[str], None], quiet_s: float = QUIET_S
    ) -> None:
        self._reason = reason
        self._tell = tell
        self._quiet_s = quiet_s
        self._came_s = time.monotonic()
        self._told = False
        self._over = threading.Event()
        # A daemon: a question that blocks must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="stall notice", daemon=True)

    def came(self) -> None:
        """Note that a part of the answer arrived, so that any recovery is over."""
        self._came_s = time.monotonic()
        self._told = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()

    def _run(self) -> None:
        left_s = self._quiet_s
        while not self._over.wait(left_s):
            left_s = self._came_s + self._quiet_s - time.monotonic()
            if left_s > 0:
                continue
            left_s = self._quiet_s
            self._ask()

    def _ask(self) -> None:
        asked_s = time.monotonic()
        reason = self._reason()
        # The question may block. A part of the answer that arrived meanwhile makes it void.
        if self._over.is_set() or self._came_s > asked_s:
            return
        if reason is not None and not self._told:
            self._tell(reason)
        self._told = reason is not None
