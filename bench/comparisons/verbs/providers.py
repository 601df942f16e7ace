"""``bench/compare.py providers``: run ten scenarios of a fleet, and check each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli.benches.run import BenchRun, bench_verb, print_machine
from convoy.cli.show.exit_codes import EXIT_FAILURE
from convoy.cli.show.output import print_table
from convoy.config.files import replace_file

if TYPE_CHECKING:
    from comparisons.fleet.load import LoadResult
    from comparisons.fleet.scenario import Scenario
    from comparisons.fleet.verdict import CheckRow
    from comparisons.local_fleet import LocalFleet
    from convoy.bench.report.report import Report


@bench_verb(model=None, max_seconds=3600)
def providers(
    run: BenchRun,
    scenario: Annotated[str, typer.Option(help="Scenario names separated by commas, or all.")] = "all",
    slots: Annotated[int, typer.Option(min=1, max=64, help="Concurrent requests of each provider.")] = 4,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with plots to this file.")
    ] = None,
) -> None:
    """Run ten loads on a coordinator and its providers. Exit 1 unless every request is answered correctly."""
    from comparisons.fleet.page import page, waits
    from comparisons.fleet.scenario import chosen_scenarios
    from comparisons.fleet.verdict import failure_rows

    chosen = chosen_scenarios(scenario)
    deadline = run.clock.deadline
    rows: list[Any] = []
    segments: list[Any] = []
    failures: list[Any] = []
    checks: list[CheckRow] = []
    lines = {}
    for one in chosen:
        deadline.left_s()
        row, found_segments, found_checks, answers = measure_scenario(run, one, slots)
        rows.append(row)
        failures += failure_rows(one.name, answers)
        segments += found_segments
        checks += found_checks
        lines[one.name] = waits(answers)
        run.say(f"{one.name}: {row.served} of {row.requests} served in {row.seconds} s")
    ratios = {
        "served": sum(row.served for row in rows) / sum(row.requests for row in rows),
        "checks_held": sum(check.held for check in checks) / len(checks),
    }
    report = run.report("providers", {"slots": slots}, [*rows, *failures, *segments, *checks], ratios)
    if html is not None:
        replace_file(html, page(report, lines).encode())
    totals = {name: waited.get("total_e2e", []) for name, waited in lines.items()}
    run.show(report, ("requests that took at most", "ms"), {n: p for n, p in totals.items() if p}, _print)
    if not all(check.held for check in checks):
        raise typer.Exit(EXIT_FAILURE)


def measure_scenario(
    run: BenchRun, scenario: Scenario, slots: int
) -> tuple[Any, Any, list[CheckRow], list[LoadResult]]:
    """Return the row, segments, checks and answers of one scenario, run on a fleet of its own."""
    from comparisons.fleet.load import FleetLoad
    from comparisons.fleet.scenario import PRICE, account_name
    from comparisons.fleet.verdict import check_rows, scenario_row, segment_rows
    from comparisons.local_fleet import FleetOptions, LocalFleet

    run.say(f"{scenario.name}: starting {scenario.num_providers} providers")
    prices = {"prompt_micro": PRICE.prompt_micro, "completion_micro": PRICE.completion_micro}
    options = FleetOptions(scenario.providers, scenario.queue_capacity, slots, prices=prices, say=run.say)
    with LocalFleet(options) as fleet:
        names = [account_name(number) for number in range(scenario.users)]
        keys = {name: fleet.open_account(name, scenario.balance_micro) for name in names}
        fleet.put_coordinator_first()
        run.say(f"{scenario.name}: {scenario.requests} requests, {scenario.concurrency} at once")
        answers, seconds = FleetLoad(scenario, fleet.url, keys).run()
        books = fleet.books()
        run.say(f"{scenario.name}: asking the models themselves")
        own = _own_answers(fleet, scenario)
    checks = check_rows(scenario, answers, own, books)
    row = scenario_row(scenario, answers, own, seconds, checks)
    return row, segment_rows(scenario.name, answers), checks, answers


def _own_answers(fleet: LocalFleet, scenario: Scenario) -> dict[int, str]:
    """Return the answers of the models themselves. Ask after the load, so that the load finds no cache."""
    from comparisons.fleet.load import ask_directly

    found: dict[int, str] = {}
    for model in scenario.providers:
        found |= ask_directly(fleet.head_url(model), scenario, model)
    return found


def _print(report: Report) -> None:
    for rows in report.tables():
        held = getattr(rows[0], "check", None) is not None
        shown: Sequence[Any] = [row for row in rows if not row.held] if held else rows
        if held:
            print(f"{len(rows) - len(shown)} of {len(rows)} checks hold")
        if shown:
            names = list(type(shown[0]).__dataclass_fields__)
            print_table(names, [[_said(getattr(row, name)) for name in names] for row in shown])
        print()
    print_machine(report)


def _said(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
