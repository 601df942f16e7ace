"""The benches of served clusters, where head and peers are processes that live, are lost and are watched."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from e2e.bench_verb import QUICK, Bench
from support.synthetic import write_config


@pytest.mark.slow
@pytest.mark.long
def test_recover_kills_a_peer_and_finds_the_same_text(bench: Bench, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    sizes = ("--losses", "kill -9", "--tokens", "64", "--before", "8", "--csv", str(table))
    shown = bench("recover", "demo-mini", *sizes)
    (row,) = shown["rows"]
    assert row["loss"] == "kill -9"
    assert row["survived"] is row["identical"] is True
    assert (row["members"], row["members_after"], row["blocks_leaked"]) == (3, 2, 0)
    assert 0 < row["seconds_to_next_token"] < 60
    assert shown["ratios"]["survived_and_identical"] == 1
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == 1


@pytest.mark.slow
@pytest.mark.long
def test_soak_watches_every_process_idle_and_busy(bench: Bench, tmp_path: Path) -> None:
    model = f"synthetic:{write_config(tmp_path)}"
    shown = bench("soak", model, "--requests", "30", "--first", "15", "--idle", "0.1", *QUICK)
    members, memory = shown["rows"][:2], shown["rows"][2:]
    assert [row["member"] for row in members] == ["alpha", "beta"]
    assert {row["requests"] for row in memory} >= {15, 30}
    assert all(row["rss_mb_first"] > 50 for row in members)
    assert shown["ratios"].keys() == {"idle_core", "memory_last_over_first"}
