"""Wait for an action of another thread or process that no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0


def wait_until(condition: Callable[[], object]) -> None:
    """Return as soon as ``condition`` holds; fail if it does not within a minute."""
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, "what was waited for never came"
        time.sleep(0.001)
