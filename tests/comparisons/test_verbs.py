"""The verbs of bench/compare.py, as a developer types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compare import app
from convoy.cli.main import run
from e2e.bench_verb import QUICK, REPORT, Bench
from support.synthetic import write_config


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    """Give compare(verb, ...): the report of `bench/compare.py verb ... --json`, typed in this process."""
    threads = torch.get_num_threads()

    def say(verb: str, *arguments: str) -> dict[str, Any]:
        code = run([verb, *arguments, "--json"], app)
        shown = capsys.readouterr()
        assert code == 0, shown.err
        report: dict[str, Any] = json.loads(shown.out)
        assert list(report) == REPORT
        assert report["bench"] == verb
        return report

    yield say
    torch.set_num_threads(threads)


def test_a_wrong_option_is_refused_as_by_convoy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fair", "--running", "0"], app) == 2
    assert "for '--running'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_fair_measures_running_streams_while_a_long_prompt_is_read(compare: Bench, tmp_path: Path) -> None:
    model = f"synthetic:{write_config(tmp_path)}"
    sizes = ("--running", "2", "--context", "20", "--prompt-tokens", "300", "--chunk", "32")
    shown = compare("fair", model, *sizes, *QUICK)
    assert [row["members"] for row in shown["rows"]] == [1, 2]
    for row in shown["rows"]:
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["p99_over_mixed_step"] == pytest.approx(row["p99_ms"] / row["mixed_step_ms"], rel=0.01)
    assert shown["ratios"].keys() == {"one_member_p99_over_mixed_step", "two_members_p99_over_mixed_step"}


@pytest.mark.slow
@pytest.mark.long
def test_soak_watches_every_process_idle_and_busy(compare: Bench, tmp_path: Path) -> None:
    model = f"synthetic:{write_config(tmp_path)}"
    shown = compare("soak", model, "--requests", "30", "--first", "15", "--idle", "0.1", *QUICK)
    members, memory = shown["rows"][:2], shown["rows"][2:]
    assert [row["member"] for row in members] == ["alpha", "beta"]
    assert {row["requests"] for row in memory} >= {15, 30}
    assert all(row["rss_mb_first"] > 50 for row in members)
    assert shown["ratios"].keys() == {"idle_core", "memory_last_over_first"}
