"""One consumer's prompt that fits no context, again and again: it closes no provider, and ends here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from convoy.fleet.books.keys import Scope
from convoy.fleet.coordinator.options import CoordinatorOptions
from support.fake_service import MAX_CONTEXT, serving
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question
from support.scraping import scrape

TOO_LONG = [{"role": "user", "content": "x" * (MAX_CONTEXT + 1)}]
CODE = "context_length_exceeded"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test", first_token_s=10.0))
    try:
        yield made
    finally:
        made.close()


def key_of(fleet: FleetUnderTest, account: str) -> str:
    fleet.ledger.open_account(account)
    fleet.ledger.credit(account, 10**9)
    return fleet.directory.make_key(Scope.CONSUMER, account)


def ask(fleet: FleetUnderTest, key: str, **more: object) -> httpx.Response:
    headers, url = {"x-api-key": key}, f"{fleet.url}/v1/chat/completions"
    return httpx.post(url, json=question(1, 2, **more), headers=headers, timeout=60, trust_env=False)


def failures(fleet: FleetUnderTest) -> float:
    found = scrape(f"{fleet.admin_url}/metrics", fleet.directory.make_key(Scope.METRICS, None))
    return sum(
        number
        for (name, _), number in found.samples.items()
        if name == "convoy_fleet_provider_failures_total"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_head_that_refuses_a_repeated_request_stays_open_for_everybody(
    fleet: FleetUnderTest, stream: bool
) -> None:
    bob, carl = key_of(fleet, "bob"), key_of(fleet, "carl")
    with serving(model=MODEL) as head:
        fleet.add("one", head.url)
        # Two accounts send the same, so the head counts more failures than the coordinator does.
        for key in (fleet.key, bob):
            for _ in range(5):
                refused = ask(fleet, key, messages=TOO_LONG, max_tokens=8, stream=stream)
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, CODE)
        again = ask(fleet, bob, messages=TOO_LONG, max_tokens=8, stream=stream)
        assert (again.status_code, again.json()["error"]["code"]) == (429, CODE)
        assert 1 <= int(again.headers["retry-after"]) <= 60
        assert failures(fleet) == 0
        assert ask(fleet, carl, max_tokens=8).status_code == 200
        fleet.stop_provider(0)


def test_the_coordinator_refuses_the_sixth_itself_and_other_refusals_may_be_repeated(
    fleet: FleetUnderTest,
) -> None:
    engine = FakeEngine()
    with engine_server(engine) as url:
        fleet.add("one", url)
        engine.trouble = ["refuses"] * 8
        assert [ask(fleet, fleet.key).status_code for _ in range(8)] == [400] * 8
        engine.trouble = ["too long"] * 5
        assert [ask(fleet, fleet.key).status_code for _ in range(6)] == [400] * 5 + [429]
        assert len(engine.bodies) == 13
        assert ask(fleet, key_of(fleet, "bob")).status_code == 200
        fleet.stop_provider(0)
