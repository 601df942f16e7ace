"""Keys with limits at a running coordinator, a consumer's and an administrator's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.transcript import run_here
from convoy.fleet.books.keys import Grant, KeyTerms, Scope
from convoy.fleet.books.price import Price
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.callers import KeyUses
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question
from support.scraping import scrape
from support.waiting import wait_until

OPTIONS = CoordinatorOptions(
    instance="test",
    models={MODEL: ModelOptions(Price(prompt_micro=1_000_000, completion_micro=2_000_000), 64)},
    queue=QueueLimits(50, 40, 20.0),
    first_token_s=10.0,
)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path, OPTIONS)
    try:
        with engine_server(FakeEngine()) as url:
            made.add("one", url)
            yield made
            made.stop_provider(0)
    finally:
        made.close()


def key_with(fleet: FleetUnderTest, **terms: int) -> str:
    return fleet.directory.make_key(Scope.CONSUMER, "ann", "", KeyTerms(**terms))


def ask(fleet: FleetUnderTest, key: str, **more: object) -> httpx.Response:
    headers = {"x-api-key": key}
    url = f"{fleet.url}/v1/chat/completions"
    return httpx.post(url, json=question(20, 22, **more), headers=headers, timeout=30, trust_env=False)


def test_requests_and_tokens_a_minute_are_the_keys_own(fleet: FleetUnderTest) -> None:
    slow, small = key_with(fleet, requests_per_minute=2), key_with(fleet, tokens_per_minute=1)
    assert [ask(fleet, slow).status_code for _ in range(3)] == [200, 200, 429]
    refused = ask(fleet, slow)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "this key may use 1" in ask(fleet, small).json()["error"]["message"]
    assert ask(fleet, fleet.key).status_code == 200
    leased = httpx.post(f"{fleet.url}/v1/leases", json={}, headers={"x-api-key": slow}, trust_env=False)
    assert leased.status_code == 429


def test_a_place_is_free_again_after_each_answer_and_each_refusal(fleet: FleetUnderTest) -> None:
    key = key_with(fleet, concurrent_requests=1)
    for _ in range(3):
        assert ask(fleet, key).status_code == 200
        assert ask(fleet, key, model="nothing").status_code == 404


def test_a_spend_limit_holds_across_requests_and_shows_in_the_list(fleet: FleetUnderTest) -> None:
    cost = fleet.ledger.balance("ann")
    assert ask(fleet, fleet.key).status_code == 200
    cost -= fleet.ledger.balance("ann")
    poor = key_with(fleet, spend_limit_micro=1)
    refused = ask(fleet, poor)
    assert (refused.status_code, refused.json()["error"]["code"]) == (402, "insufficient_quota")
    assert "of 1 are left to this API key" in refused.json()["error"]["message"]
    rich = key_with(fleet, spend_limit_micro=10**11)
    assert ask(fleet, rich).status_code == 200
    listed = fleet.directory.keys()
    spent = {one.terms.spend_limit_micro: one.spent_micro for one in listed}
    assert (spent[1], spent[10**11]) == (0, cost)


def test_administrators_keys_have_a_rate_and_are_made_on_the_command_line(
    fleet: FleetUnderTest, tmp_path: Path
) -> None:
    (tmp_path / "admin.key").touch(mode=0o600)
    (tmp_path / "admin.key").write_text(fleet.admin_key + "\n")
    keys = ["coordinator", "keys", "--admin-url", fleet.admin_url, "--admin-key-file", "admin.key", "--json"]
    limits = ["--requests-per-minute", "2", "--expires", "2099-01-01", "--label", "night shift"]
    made = json.loads(run_here([*keys, "--admin", *limits], tmp_path).stdout)
    headers = {"authorization": f"Bearer {made['key']}"}
    statuses = [
        httpx.get(f"{fleet.admin_url}/status", headers=headers, timeout=30, trust_env=False).status_code
        for _ in range(3)
    ]
    assert statuses == [200, 200, 429]
    (listed,) = [one for one in json.loads(run_here(keys, tmp_path).stdout) if one["label"] == "night shift"]
    assert (listed["expires_s"], listed["requests_per_minute"]) == (4070908800, 2)
    refused = run_here([*keys, "--admin", "--spend-limit", "5"], tmp_path)
    assert "uses no tokens and no money" in refused.stderr


def test_what_is_said_of_a_new_key_needs_one_and_its_balance_is_told(
    fleet: FleetUnderTest, tmp_path: Path
) -> None:
    (tmp_path / "admin.key").touch(mode=0o600)
    (tmp_path / "admin.key").write_text(fleet.admin_key + "\n")
    keys = ["coordinator", "keys", "--admin-url", fleet.admin_url, "--admin-key-file", "admin.key"]
    lost = run_here([*keys, "--credit", "100"], tmp_path)
    assert (lost.returncode, lost.stdout) == (2, "")
    assert "hint: --add ACCOUNT makes one" in lost.stderr
    made = run_here([*keys, "--add", "eve", "--credit", "5000000"], tmp_path)
    assert "eve has a balance of 5,000,000 millionths of a unit\n" in made.stderr
    misplaced = run_here(["coordinator", "--dir", "other", "providers"], tmp_path)
    assert misplaced.returncode == 2
    assert "error: --dir stands in front of providers" in misplaced.stderr


def test_wrong_keys_are_counted_at_both_listeners(fleet: FleetUnderTest) -> None:
    reader = fleet.directory.make_key(Scope.METRICS, None)
    assert ask(fleet, "convoy-nobody-has-this").status_code == 401
    wrong = {"authorization": "Bearer convoy-nobody-has-this"}
    assert httpx.get(f"{fleet.admin_url}/status", headers=wrong, trust_env=False).status_code == 401
    assert httpx.get(f"{fleet.url}/v1/models", trust_env=False).status_code == 401
    wait_until(lambda: scrape(f"{fleet.admin_url}/metrics", reader).has("convoy_http_failed_keys_total"))
    found = scrape(f"{fleet.admin_url}/metrics", reader)
    assert found("convoy_http_failed_keys_total", reason="wrong") == 2
    assert found("convoy_http_failed_keys_total", reason="none") == 1


def test_the_table_of_uses_is_bounded_and_keeps_what_runs() -> None:
    uses = KeyUses(max_keys=4)
    grants = [Grant("ann", bytes([number]) * 32, KeyTerms(concurrent_requests=1)) for number in range(20)]
    with uses.of(grants[0]).begin():
        kept = uses.of(grants[0])
        for grant in grants:
            uses.of(grant)
        assert uses.num_keys == 4
        assert uses.of(grants[0]) is kept
