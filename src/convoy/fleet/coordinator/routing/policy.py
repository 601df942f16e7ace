"""Which provider a request goes to: the one that would finish it first.

The estimate is of seconds: what stands before it there and its own prompt over the measured rate of reading,
then its tokens over the measured rate of a stream among so many others, and what failures lately cost there.
A prompt whose beginning a provider has read before is shorter there.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from convoy.fleet.coordinator.routing.ask import RouteRequest
from convoy.fleet.coordinator.routing.providers import ProviderTable

NEAR = 1.02  # finish times this close to the best are alike, and the least busy of them is taken


class RoutingPolicy(Protocol):
    """Chooses among the seats that may and can take a request at once; None if there is none."""

    def choose(
        self, seats: ProviderTable, ask: RouteRequest, output_tokens: float, now_s: float
    ) -> str | None: ...


class FirstToFinish:
    """What the coordinator does."""

    def choose(
        self, seats: ProviderTable, ask: RouteRequest, output_tokens: float, now_s: float
    ) -> str | None:
        """The name of a provider; ``output_tokens`` is how many the answer is expected to have."""
        found = np.flatnonzero(seats.allowed(ask, now_s))
        finish = seats.finish_s(ask, output_tokens)[found]
        known = np.isfinite(finish)  # an estimate that is none must not hide the others
        found, finish = found[known], finish[known]
        if not len(found):
            return None
        alike = found[finish <= finish.min() * NEAR]
        busy = seats.column("running")[alike] / seats.column("slots")[alike]
        least = alike[busy <= busy.min()]
        # equal ones take turns, so that not all the world begins with the first
        return seats.name(int(least[ask.number % len(least)]))
