"""A shared amount of bytes: memory for messages that peers have begun to send and not finished.

It is apart from the options that name it because those are frozen values, and this has a lock and a state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

DEFAULT_BUDGET_BYTES = 512 * 1024 * 1024


class ByteBudget:
    """Limit the bytes taken at any time to ``max_bytes``.

    Thread-safe; all links of a process share one instance.
    """

    def __init__(self, max_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.max_bytes = max_bytes
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def taken_bytes(self) -> int:
        return self._taken

    def take(self, num_bytes: int, timeout_s: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Take ``num_bytes``, and wait for others to give some back if necessary.

        Return False after ``timeout_s``, once ``over()`` is true, or if ``num_bytes`` exceeds the whole
        budget.
        """
        if num_bytes > self.max_bytes:
            return False
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while self._taken + num_bytes > self.max_bytes:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or over():
                    return False
                self._changed.wait(min(left_s, 0.25))
            self._taken += num_bytes
            return True

    def give(self, num_bytes: int) -> None:
        with self._changed:
            self._taken -= num_bytes
            self._changed.notify_all()
