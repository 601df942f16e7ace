"""Tell whether a member that starts, or fetches or checks weights, makes progress.

Only then is it waited for longer.

It is apart because the head's bring-up and its prefetch both use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import get_args

from convoy.wire.messages.control import Progress, StartPhase

# Passes of one member: files, digests, a hub and the head, and each once more.
_MAX_PASSES = 32
# The reports of a phase of a start count for so long: time passes by itself.
_MAX_START_S = 600.0
START_PHASES = frozenset(get_args(StartPhase))


class ProgressWatch:
    """Hold the progress that members reported. Not thread-safe. ``now`` is this member's own clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._reached: dict[str, dict[tuple[str, int], int]] = {}
        self._began_s: dict[tuple[str, str], float] = {}

    def is_further(self, member: str, progress: Progress) -> bool:
        """Return whether a report exceeds all earlier ones of its pass.

        A pass has a phase and a total of its own. The number of passes is bounded, so that no member can
        be waited for without end by its own word. A phase of the start has neither a plan nor a total, and
        its reports count for ten minutes after the first.
        """
        if progress.stage in START_PHASES and not self._is_in_start(member, progress):
            return False
        passes = self._reached.setdefault(member, {})
        key = progress.stage, progress.total_bytes
        if key not in passes and len(passes) >= _MAX_PASSES:
            return False
        if progress.loaded_bytes <= passes.get(key, -1):
            return False
        passes[key] = progress.loaded_bytes
        return True

    def _is_in_start(self, member: str, progress: Progress) -> bool:
        if progress.plan_id or progress.total_bytes:
            return False
        now_s = self._now()
        return now_s - self._began_s.setdefault((member, progress.stage), now_s) < _MAX_START_S
