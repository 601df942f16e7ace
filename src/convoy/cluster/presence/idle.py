"""Members that are here and hold no layers, and since when."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from convoy.cluster.status import IdleStatus
from convoy.wire.messages.control import Hello


class IdleTimes:
    """Since when each member would be idle: it came, or a plan began that no longer has it."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._since_s: dict[str, float] = {}

    def begin(self, names: Collection[str]) -> None:
        """These hold no layers from now on."""
        for name in names:
            self._since_s[name] = self._now()

    def report(self, here: Mapping[str, Hello], members: Collection[str]) -> list[IdleStatus]:
        """Those of ``here`` outside ``members``, which hold layers. Standbys are meant to hold none."""
        return [
            IdleStatus(name, self._since_s.get(name, self._now()))
            for name, hello in sorted(here.items())
            if name not in members and not hello.standby
        ]
