"""The table of attacks, and the members that are attacked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adversary.arena import Arena
from adversary.ledger import Ledger, Row

LEDGER = pytest.StashKey[Ledger]()
INNER, BOTH = "inner alone", "both"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table-json", type=Path, default=None, help="write the table of attacks there, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "attack(name, layer=...): the row of the table that a test fills")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that shares the tests out which rows were filled here."""
    told: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["attacks"] = _ledger(session.config).as_json()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the rows of a worker that has ended. One that was killed has told none."""
    _ledger(node.config).merge(getattr(node, "workeroutput", {}).get("attacks", []))


def _ledger(config: pytest.Config) -> Ledger:
    return config.stash.setdefault(LEDGER, Ledger())


@pytest.fixture(scope="session", params=[BOTH, INNER])
def arena(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """Run two members as processes, with a link that no test attacks."""
    with Arena.open(tmp_path_factory.mktemp("arena"), request.param) as opened:
        yield opened


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """Return the row that this test fills."""
    marker = request.node.get_closest_marker("attack")
    assert marker is not None, "a test of this suite names its attack"
    layer = marker.kwargs.get("layer")
    if layer is None:
        layer = request.getfixturevalue("arena").layer
    row = _ledger(request.config).row(marker.args[0], layer)
    request.node.stash[ROW] = row
    return row


ROW = pytest.StashKey[Row]()


@pytest.fixture(autouse=True)
def _others_unharmed(request: pytest.FixtureRequest, row: Row) -> Iterator[None]:
    """Check after each attack that both processes live, in bounded memory, and that the link beside works."""
    yield
    if "arena" in request.fixturenames:
        request.getfixturevalue("arena").check_unharmed()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    row = item.stash.get(ROW, None)
    if row is not None and report.failed:
        row.failed = True
    return report  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ledger = _ledger(config)
    if not ledger.rows():
        return
    terminalreporter.section("attacks")
    for line in ledger.lines():
        terminalreporter.write_line(line)
    held = sum(row.held for row in ledger.rows())
    terminalreporter.write_line(f"{held} of {len(ledger.rows())} rows held")
    path: Path | None = config.getoption("--table-json", default=None)
    if path is not None:
        path.write_text(json.dumps({"rows": ledger.as_json()}, indent=1) + "\n", encoding="utf-8")
