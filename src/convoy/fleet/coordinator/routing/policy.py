"""Choose the provider that would finish a request first.

The estimate is in seconds. It adds the provider's backlog and the request's own prompt over the measured
prefill rate, then the request's tokens over the measured rate of a stream among so many others, and the
penalty of recent failures. A prompt that begins like one that the provider has read before counts as shorter.

It is apart from the dispatcher so that simulations route by the same rule without a dispatcher.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from convoy.fleet.coordinator.routing.providers import ProviderTable
from convoy.fleet.coordinator.routing.route_request import RouteRequest

# Finish times this close to the best count as equal, and the least busy of these providers is taken.
NEAR = 1.02


class RoutingPolicy(Protocol):
    """Choose the name of a provider that may and can take a request at once, or None."""

    def choose(
        self, providers: ProviderTable, ask: RouteRequest, output_tokens: float, now_s: float
    ) -> str | None: ...


class FirstToFinish:
    """Choose the provider with the earliest estimated finish. The coordinator uses this policy."""

    def choose(
        self, providers: ProviderTable, ask: RouteRequest, output_tokens: float, now_s: float
    ) -> str | None:
        """Return the name of a provider, or None. ``output_tokens`` is the expected length of the answer."""
        found = np.flatnonzero(providers.allowed(ask, now_s))
        finish = providers.finish_s(ask, output_tokens)[found]
        # One estimate that is not a number must not hide the others.
        known = np.isfinite(finish)
        found, finish = found[known], finish[known]
        if not len(found):
            return None
        alike = found[finish <= finish.min() * NEAR]
        busy = providers.column("running")[alike] / providers.column("slots")[alike]
        least = alike[busy <= busy.min()]
        # Equal providers take turns, so that not every coordinator begins with the first one.
        return providers.name(int(least[ask.number % len(least)]))
