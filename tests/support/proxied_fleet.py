"""A whole fleet for one API: a head's own HTTP server, a provider, a coordinator, and a blind proxy."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from convoy.fleet.books.price import Price
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.proxy.trust import Trust
from support.fake_service import FakeEngine, serving
from support.fleet import MODEL, FleetUnderTest
from support.proxy import proxy
from support.waiting import wait_until

BALANCE = 10**12
# The limit of a request that names none.
MAX_TOKENS = 500
WAYS = pytest.mark.parametrize("way", ["coordinator", "proxy"])


class ProxiedFleet:
    """Run a fleet with one provider before ``engine`` or ``engine_url``, and a proxy that trusts it.

    A prompt's token costs 1, and an answer's 2.
    """

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        engine: FakeEngine | None = None,
        *,
        engine_url: str = "",
    ) -> None:
        self.engine = engine or FakeEngine()
        head = engine_url or stack.enter_context(serving(self.engine, model=MODEL)).url
        models = {MODEL: ModelOptions(Price(1_000_000, 2_000_000), MAX_TOKENS)}
        options = CoordinatorOptions(instance="test", models=models, first_token_s=10.0)
        self.fleet = FleetUnderTest(folder, options)
        stack.callback(self.fleet.close)
        self.fleet.add("one", head)
        trust = Trust(frozenset(self.fleet.identities))
        way = proxy(self.fleet.url, self.fleet.key, trust, default_max_tokens=MAX_TOKENS)
        self.urls = {"head": head, "coordinator": self.fleet.url, "proxy": stack.enter_context(way)}

    def ask(self, way: str, path: str, method: str = "POST", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.fleet.key}"}
        url, json = f"{self.urls[way]}{path}", body or None
        return httpx.request(method, url, json=json, headers=headers, timeout=30, trust_env=False)

    def paid(self) -> int:
        """Return the cost of all requests so far, once nothing is held."""
        ledger = self.fleet.ledger

        def cost() -> int:
            return sum(one.cost_micro for one in ledger.usage("ann"))

        wait_until(lambda: ledger.balance("ann") + cost() == BALANCE)
        return cost()
