"""Members that are connected and hold no layers, and the time since when."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from convoy.cluster.status import IdleStatus
from convoy.wire.messages.control import Hello


class IdleTimes:
    """Track since when each member is idle: since it came, or since a plan began without it."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._since_s: dict[str, float] = {}

    def begin(self, names: Collection[str]) -> None:
        """Note that these members hold no layers from now on."""
        for name in names:
            self._since_s[name] = self._now()

    def report(self, here: Mapping[str, Hello], members: Collection[str]) -> list[IdleStatus]:
        """Return the idle members of ``here``: those that are not in ``members``, which hold layers.

        Standbys are left out, because they are meant to hold no layers.
        """
        return [
            IdleStatus(name, self._since_s.get(name, self._now()))
            for name, hello in sorted(here.items())
            if name not in members and not hello.standby
        ]
