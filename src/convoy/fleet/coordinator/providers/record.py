"""Remember when providers came, why others went, and why registrations were refused.

Each list has a bound, and the oldest entry goes first. Texts of refusals may quote a stranger, so only
administrators see them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from convoy.fleet.status import Departure, GoneProvider, RefusedProviders

_MAX_GONE, _MAX_REFUSED = 64, 16


class ProviderRecord:
    """Hold the record of this process, on the event loop's thread. ``now`` is Unix time in seconds."""

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        *,
        max_gone: int = _MAX_GONE,
        max_refused: int = _MAX_REFUSED,
    ) -> None:
        self._now = now
        self._max_gone, self._max_refused = max_gone, max_refused
        self._since: dict[str, float] = {}
        self._gone: OrderedDict[str, GoneProvider] = OrderedDict()
        self._refused: OrderedDict[str, RefusedProviders] = OrderedDict()
        self.num_lost = self.num_removed = 0

    def joined(self, name: str) -> None:
        """Note that a provider has come."""
        self._gone.pop(name, None)
        self._since[name] = self._now()

    def since(self, name: str) -> float:
        """Return when a connected provider came, in Unix time."""
        return self._since[name]

    def left(self, name: str, identity: bytes, level: str, reason: str, how: Departure) -> None:
        """Note that a provider has gone, why, and how."""
        self._since.pop(name, None)
        self.num_lost += how == "lost"
        self.num_removed += how == "removed"
        self._gone[name] = GoneProvider(name, identity.hex(), level, reason, self._now(), how)
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)

    def refused(self, reason: str) -> None:
        """Note that a registration was refused."""
        before = self._refused.pop(reason, None)
        times = 1 if before is None else before.times + 1
        self._refused[reason] = RefusedProviders(reason, times, self._now())
        if len(self._refused) > self._max_refused:
            self._refused.popitem(last=False)

    def gone(self) -> list[GoneProvider]:
        """Return the providers that are not back, the latest first."""
        return list(reversed(self._gone.values()))

    def refusals(self) -> list[RefusedProviders]:
        """Return the reasons of refusals, the latest first."""
        return list(reversed(self._refused.values()))
