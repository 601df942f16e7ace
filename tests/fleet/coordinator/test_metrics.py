"""Scrape a coordinator after requests that went well and others that did not."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.transcript import run_here
from convoy.fleet.books.keys import Scope
from convoy.fleet.books.price import Price
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from convoy.fleet.timing import SEGMENTS
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question
from support.scraping import Scrape, scrape
from support.waiting import wait_until

OPTIONS = CoordinatorOptions(
    instance="test",
    models={MODEL: ModelOptions(Price(prompt_micro=1_000_000, completion_micro=2_000_000), 64)},
    queue=QueueLimits(50, 40, 20.0),
    first_token_s=10.0,
)


class Scraped:
    def __init__(self, fleet: FleetUnderTest) -> None:
        self.fleet = fleet
        self.key = fleet.directory.make_key(Scope.METRICS, None, "prometheus")

    def __call__(self) -> Scrape:
        return scrape(f"{self.fleet.admin_url}/metrics", self.key)

    def after(self, num_requests: int) -> Scrape:
        """Scrape after a request, which is counted a moment after its last byte."""
        wait_until(lambda: self()("convoy_fleet_segment_seconds_count", segment="parse") == num_requests)
        return self()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def scraped(tmp_path: Path, engine: FakeEngine) -> Iterator[Scraped]:
    fleet = FleetUnderTest(tmp_path, OPTIONS)
    try:
        with engine_server(engine) as url:
            fleet.add("one", url)
            yield Scraped(fleet)
            fleet.stop_provider(0)
    finally:
        fleet.close()


def ask(fleet: FleetUnderTest, one: int, two: int, **more: object) -> httpx.Response:
    with fleet.client() as client:
        return client.post("/v1/chat/completions", json=question(one, two, **more))


def test_requests_tokens_and_every_segment_are_counted_once(scraped: Scraped) -> None:
    usages = [ask(scraped.fleet, 20, n).json()["usage"] for n in range(3)]
    assert ask(scraped.fleet, 20, 22, stream=True).status_code == 200
    found = scraped.after(4)
    assert found("convoy_fleet_requests_total", model=MODEL, outcome="complete") == 4
    prompt = sum(one["prompt_tokens"] for one in usages) + len("What is 20+22?")
    completion = sum(one["completion_tokens"] for one in usages) + len("42")
    assert found("convoy_fleet_billed_tokens_total", model=MODEL, kind="prompt") == prompt
    assert found("convoy_fleet_billed_tokens_total", model=MODEL, kind="completion") == completion
    charged = found("convoy_fleet_charged_micro_total", model=MODEL)
    assert charged == prompt + 2 * completion == 10**12 - scraped.fleet.ledger.balance("ann")
    sums = {}
    for segment in SEGMENTS:
        assert found("convoy_fleet_segment_seconds_count", segment=segment) == 4
        sums[segment] = found("convoy_fleet_segment_seconds_sum", segment=segment)
    assert sums["total_e2e"] >= sums["first_token"] >= sums["coordinator_to_provider"] > sums["parse"] > 0
    assert found.kinds["convoy_fleet_segment_seconds"] == "histogram"
    assert found("convoy_fleet_providers", model=MODEL) == 1
    assert found("convoy_fleet_free_slots", model=MODEL) == 4
    assert found("convoy_fleet_providers_connected", level="none", draining="false") == 1
    assert found("convoy_http_requests_total", path="/v1/chat/completions", status="200") == 4
    assert found("convoy_build_info", part="coordinator") == 1


def test_what_runs_and_waits_is_there_while_it_does(scraped: Scraped, engine: FakeEngine) -> None:
    engine.trouble = ["slow"]
    with (
        scraped.fleet.client() as client,
        client.stream("POST", "/v1/chat/completions", json=question(20, 22, stream=True)) as answer,
    ):
        assert answer.status_code == 200
        found = scraped()
        assert found("convoy_fleet_requests_running", model=MODEL) == 1
        assert found("convoy_fleet_requests_waiting", model=MODEL) == 0
        assert found("convoy_fleet_free_slots", model=MODEL) == 3
        engine.go_on.set()
        answer.read()
    assert scraped.after(1)("convoy_fleet_requests_running", model=MODEL) == 0


def test_failures_and_refusals_are_counted_by_what_they_were(scraped: Scraped, engine: FakeEngine) -> None:
    engine.trouble = ["cut"]
    ask(scraped.fleet, 1, 22, stream=True)
    assert ask(scraped.fleet, 1, 1, max_tokens=10**12).status_code in {400, 402}
    assert ask(scraped.fleet, 1, 1, model="nobody-has-this").status_code == 404
    with scraped.fleet.client() as client:
        assert client.get("/v1/secret-path").status_code == 404
    wait_until(lambda: scraped().has("convoy_fleet_provider_failures_total", provider="one"))
    found = scraped()
    assert found("convoy_fleet_provider_failures_total", provider="one") == 1
    assert not found.has("convoy_fleet_requests_total", outcome="complete")
    assert not found.has("convoy_fleet_billed_tokens_total")
    assert found("convoy_http_requests_total", path="/v1/chat/completions", status="404") == 1
    assert found("convoy_http_requests_total", path="other", status="404") == 1
    for secret in ("nobody-has-this", "secret-path"):
        assert secret not in found.text


def test_no_account_key_or_text_is_in_a_scrape(scraped: Scraped) -> None:
    said = ask(scraped.fleet, 123456, 1)
    text = scraped.after(1).text
    answer = said.json()["choices"][0]["message"]["content"]
    keys = (scraped.key, scraped.fleet.key, scraped.fleet.admin_key)
    for secret in (answer, "123456", "What is", "ann", *keys, *(key[7:20] for key in keys)):
        assert secret not in text


def test_a_key_that_scrapes_does_nothing_else_and_no_other_key_scrapes(scraped: Scraped) -> None:
    fleet = scraped.fleet

    def status(url: str, key: str | None) -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.get(url, headers=headers, timeout=60, trust_env=False).status_code

    assert status(f"{fleet.admin_url}/status", scraped.key) == 403
    assert status(f"{fleet.url}/v1/models", scraped.key) == 403
    assert status(f"{fleet.admin_url}/metrics", fleet.admin_key) == 403
    assert status(f"{fleet.admin_url}/metrics", fleet.key) == 403
    assert status(f"{fleet.admin_url}/metrics", None) == 401
    assert status(f"{fleet.url}/metrics", scraped.key) == 404  # nothing of it at the consumers' listener


def test_a_key_for_scraping_is_made_and_revoked_on_the_command_line(scraped: Scraped, tmp_path: Path) -> None:
    fleet = scraped.fleet
    (tmp_path / "admin.key").touch(mode=0o600)
    (tmp_path / "admin.key").write_text(fleet.admin_key + "\n")
    keys = ["coordinator", "keys", "--admin-url", fleet.admin_url, "--admin-key-file", "admin.key", "--json"]
    done = run_here([*keys, "--metrics", "--label", "prometheus"], tmp_path)
    assert done.returncode == 0, done
    made = json.loads(done.stdout)
    assert (made["scope"], made["account"]) == ("metrics", None)
    assert scrape(f"{fleet.admin_url}/metrics", made["key"])("convoy_draining") == 0
    hint = made["key"].removeprefix("convoy-")[:4]
    assert json.loads(run_here([*keys, "--revoke", "", hint], tmp_path).stdout) == {"revoked": 1}
    headers = {"authorization": f"Bearer {made['key']}"}
    assert httpx.get(f"{fleet.admin_url}/metrics", headers=headers, timeout=60).status_code == 401
    assert run_here([*keys, "--metrics", "--add", "ann"], tmp_path).returncode == 2


def test_a_new_key_goes_to_a_private_file_and_is_not_shown(scraped: Scraped, tmp_path: Path) -> None:
    fleet = scraped.fleet
    (tmp_path / "admin.key").touch(mode=0o600)
    (tmp_path / "admin.key").write_text(fleet.admin_key + "\n")
    keys = ["coordinator", "keys", "--admin-url", fleet.admin_url, "--admin-key-file", "admin.key"]
    done = run_here([*keys, "--metrics", "--out", "scrape.key"], tmp_path)
    assert done.returncode == 0, done
    file = tmp_path / "scrape.key"
    key = file.read_text(encoding="utf-8").strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert scrape(f"{fleet.admin_url}/metrics", key)("convoy_draining") == 0
    assert key not in done.stdout + done.stderr
    assert run_here([*keys, "--metrics", "--out", "scrape.key"], tmp_path).returncode == 78
    assert file.read_text(encoding="utf-8").strip() == key
