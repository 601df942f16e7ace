"""A thread that waits for a device's results, seals and sends them, while the next step starts.

A stage on the host gains nothing from it: there, the thread that runs steps computes them itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from convoy.errors import ConvoyError, StepError

_log = logging.getLogger(__name__)

Failed = Callable[[int, ConvoyError], None]


class DeviceSender:
    """Send steps in the order in which they were put.

    ``failed`` is called, on this thread, with the first step that could not be sent; nothing is sent after
    it.
    """

    def __init__(self, name: str, failed: Failed) -> None:
        self._failed = failed
        self._waiting: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._over = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, step: int, leave: Callable[[], None]) -> None:
        """Queue ``leave``, which waits for the step's result and sends it.

        Never blocks: steps in flight are bounded.
        """
        self._waiting.put((step, leave))

    def close(self) -> None:
        """Drop the steps that were not sent; the thread ends as soon as its link lets it."""
        self._over = True
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._over:
                continue
            step, leave = item
            try:
                leave()
            except ConvoyError as error:
                self._fail(step, error)
            except Exception as error:  # noqa: BLE001 - logged whole, and told
                # The driver raises errors of many types, and the waiting side must hear of each.
                _log.exception("a step could not leave")
                self._fail(step, StepError(f"internal error: {type(error).__name__}"))

    def _fail(self, step: int, error: ConvoyError) -> None:
        if not self._over:
            self._over = True
            self._failed(step, error)
