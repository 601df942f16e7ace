"""The benches of served clusters, where head and peers are processes that live, are lost and are watched."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from e2e.bench_verb import Bench


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
