"""The load, verdict and report of `bench/compare.py providers`, over a coordinator with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compare import app
from comparisons.fleet.load import FleetLoad, LoadResult, ask_directly
from comparisons.fleet.page import page, waits
from comparisons.fleet.scenario import PRICE, Scenario, account_name, chosen_scenarios, load_scenarios
from comparisons.fleet.verdict import (
    Books,
    CheckRow,
    books_of,
    check_rows,
    failure_rows,
    scenario_row,
    segment_rows,
)
from comparisons.verbs import providers as bench_providers
from convoy.bench.report.machine import Machine
from convoy.bench.report.report import Report
from convoy.cli.main import run
from convoy.errors import UsageError
from convoy.fleet.books.keys import Scope
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.timing import SEGMENTS
from support.fleet import FAST, MODEL, FakeEngine, FleetUnderTest, engine_server

SMALL = Scenario(
    name="small",
    providers={MODEL: 2},
    users=3,
    requests=12,
    concurrency=10,
    stream=True,
    max_tokens=16,
    queue_capacity=20,
    balance_micro=1_000_000,
    prompt_bytes=200,
)
TIMES = (": mean ms", ": p95 ms")  # of this machine, whatever else it does


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FleetUnderTest, str]]:
    """Yield a fleet of two, and its engine's URL."""
    options = CoordinatorOptions(models={MODEL: ModelOptions(PRICE)})
    made = FleetUnderTest(tmp_path_factory.mktemp("fleet"), options)
    with engine_server(FakeEngine()) as url:
        try:
            for name in ("one", "two"):
                made.add(name, url, replace(FAST, slots=2))
            yield made, url
        finally:
            made.close()


def keys_of(fleet: FleetUnderTest, scenario: Scenario) -> dict[str, str]:
    """Return the keys of accounts that are opened for it."""
    keys = {}
    for number in range(scenario.users):
        name = account_name(number)
        fleet.ledger.open_account(name)
        fleet.ledger.credit(name, scenario.balance_micro)
        keys[name] = fleet.directory.make_key(Scope.CONSUMER, name)
    return keys


def failed(checks: list[CheckRow]) -> set[str]:
    return {check.check for check in checks if not check.held and not check.check.endswith(TIMES)}


def test_a_fleet_that_serves_all_holds_in_every_check(
    fleet: tuple[FleetUnderTest, str],
) -> None:
    made, url = fleet
    answers, seconds = FleetLoad(SMALL, made.url, keys_of(made, SMALL)).run()
    own = ask_directly(url, SMALL, MODEL)
    checks = check_rows(SMALL, answers, own, books_of(made.ledger))
    assert failed(checks) == set()
    row = scenario_row(SMALL, answers, own, seconds, checks)
    assert (row.served, row.right, row.sums_right) == (12, 12, 12)
    segments = {row.segment: row for row in segment_rows(SMALL.name, answers)}
    assert segments["encrypt"].count == segments["dispatch"].count == segments["total_e2e"].count == 12
    assert ("queue_wait" in segments) == (row.queued > 0)
    assert len(answers[0].asked.body["messages"][0]["content"].encode()) == 200


def whole(number: int) -> LoadResult:
    """Make a good answer, as if it had come."""
    asked = SMALL.asked(number)
    timing = {f"{segment}_us": 100 for segment in SEGMENTS}
    return LoadResult(
        asked, 200, "", asked.total, f"id-{number}", "one", 10, 2, 1, True, timing_us=timing, total_s=0.1
    )


@pytest.fixture
def good() -> tuple[list[LoadResult], dict[int, str], Books]:
    answers = [whole(number) for number in range(12)]
    own = {answer.asked.number: answer.text for answer in answers}
    cost = 4 * PRICE.cost(10, 2)
    names = [account_name(number) for number in range(3)]
    left = SMALL.balance_micro - cost
    return (
        answers,
        own,
        Books(dict.fromkeys(names, 4), dict.fromkeys(names, cost), dict.fromkeys(names, left)),
    )


def test_what_is_good_holds(good: tuple[list[LoadResult], dict[int, str], Books]) -> None:
    assert failed(check_rows(SMALL, *good)) == set()


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"status": 429, "error": "queue_full"}, "requests served"),
        ({"is_complete": False}, "requests served"),
        ({"text": "wrong"}, "answers right"),
        ({"response_id": "id-1"}, "answers given twice"),
        ({"ends": 2}, "answers given twice"),
        ({"completion_tokens": 3}, "accounts charged what was used"),
    ],
)
def test_one_bad_answer_among_many_is_a_check_that_fails(
    good: tuple[list[LoadResult], dict[int, str], Books], change: dict[str, object], missed: str
) -> None:
    answers, own, books = good
    for name, value in change.items():
        setattr(answers[0], name, value)
    assert missed in failed(check_rows(SMALL, answers, own, books))


def test_requests_that_failed_are_told_by_what_they_got(
    good: tuple[list[LoadResult], dict[int, str], Books],
) -> None:
    answers, _, _ = good
    for answer in answers[:3]:
        answer.status, answer.error = 429, "queue_full"
    answers[5].is_complete = False
    rows = [(row.status, row.error, row.count) for row in failure_rows("small", answers)]
    assert rows == [(200, "it ended early", 1), (429, "queue_full", 3)]


def test_a_segment_that_nothing_stamps_fails_by_name(
    good: tuple[list[LoadResult], dict[int, str], Books],
) -> None:
    answers, own, books = good
    del answers[3].timing_us["encrypt_us"]
    answers[4].timing_us["dispatch_us"] = 0
    found = failed(check_rows(SMALL, answers, own, books))
    assert found == {"encrypt: present", "encrypt: above 0", "dispatch: above 0"}


def test_a_slow_coordinator_fails_by_its_mean_and_by_its_p95(
    good: tuple[list[LoadResult], dict[int, str], Books],
) -> None:
    answers, own, books = good
    answers[0].timing_us["parse_us"] = 60_000
    slow = {check.check for check in check_rows(SMALL, answers, own, books) if not check.held}
    assert slow == {"parse: mean ms", "parse: p95 ms"}


def test_books_that_do_not_add_up_fail(good: tuple[list[LoadResult], dict[int, str], Books]) -> None:
    answers, own, books = good
    wrong = Books(
        {**books.charged, "user-0": 5}, books.cost_micro, {**books.balance_micro, "user-1": 0}, ["user-2"]
    )
    assert failed(check_rows(SMALL, answers, own, wrong)) == {
        "accounts charged once for each request",
        "balances that add up",
        "balances that are the sum of their entries",
    }


def test_the_scenarios_are_the_ten_of_the_lineage() -> None:
    there = load_scenarios()
    assert len(there) == 10
    assert sum(one.requests for one in there.values()) == 450
    mixed = there["7-provider-multi-model"]
    assert (mixed.num_providers, mixed.users, mixed.concurrency) == (7, 5, 10)
    assert [mixed.asked(number).model for number in range(3)] == ["demo", "demo-mini", "demo"]
    assert len(there["3-provider-heavy-100conc-10kb"].asked(0).body["messages"][0]["content"]) == 10_240
    with pytest.raises(UsageError, match="no scenario 'none'"):
        chosen_scenarios("1-provider-scaling,none")


def test_the_page_needs_nothing_from_elsewhere_and_marks_what_failed(
    good: tuple[list[LoadResult], dict[int, str], Books],
) -> None:
    answers, own, books = good
    answers[0].text = "<wrong>"
    checks = check_rows(SMALL, answers, own, books)
    machine = Machine("a <cpu>", 2, "Linux", "3.11", "OpenSSL", 0.0, 0.0)
    row = scenario_row(SMALL, answers, own, 2.0, checks)
    rows = (row, *segment_rows(SMALL.name, answers), *checks)
    text = page(Report("providers", machine, None, {}, rows, {}), {SMALL.name: waits(answers)})
    assert text.count('<tr class="no">') == 2, "the scenario, and its answers"
    assert "a &lt;cpu&gt;" in text
    assert "<svg" in text
    assert not any(word in text for word in ("<script", "http://127", "https://", "<wrong>"))


def test_a_failed_check_is_exit_status_1(
    good: tuple[list[LoadResult], dict[int, str], Books],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    answers, own, books = good

    def measured(
        _run: object, scenario: Scenario, _slots: int
    ) -> tuple[object, object, list[CheckRow], object]:
        checks = check_rows(SMALL, answers, own, books)
        return scenario_row(SMALL, answers, own, 1.0, checks), segment_rows("small", answers), checks, answers

    monkeypatch.setattr(bench_providers, "measure_scenario", measured)
    verb = ["providers", "--scenario", "1-provider-scaling", "--html", str(tmp_path / "page.html")]
    assert run(verb, app) == 0
    assert "checks hold" in capsys.readouterr().out
    answers[0].status = 429
    assert run(verb, app) == 1
    assert "requests served" in capsys.readouterr().out
    assert (tmp_path / "page.html").exists()
