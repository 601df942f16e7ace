"""`convoy bench comms --what all-reduce`: a real second process, and each way once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.bench.ranks.all_reduce import AllReduceOptions, AllReduceRow, all_reduce_ratios


@pytest.mark.long
def test_comms_measures_sums_by_size_and_way(tmp_path: Path) -> None:
    csv = tmp_path / "sums.csv"
    asked = ["--what", "all-reduce", "--sums", "2,1024", "--rounds", "1", "--json", "--csv", str(csv)]
    done = run_here(["bench", "comms", *asked, "--plot", str(tmp_path / "sums.svg")], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bench"] == "comms"
    rows = [(row["through"], row["bytes"]) for row in report["rows"]]
    assert rows == [(way, size) for way in ("sealed", "gloo") for size in (2048, 1024 * 1024)]
    assert all(0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"] for row in report["rows"])
    assert csv.read_text().startswith("through,bytes,p50_us")
    assert (tmp_path / "sums.svg").read_text().startswith("<svg")


def test_what_is_neither_hop_nor_sum_is_refused(tmp_path: Path) -> None:
    done = run_here(["bench", "comms", "--what", "sums"], tmp_path)
    assert done.returncode == 2
    assert "expected hop, all-reduce or both" in done.stderr


def test_large_sums_get_fewer_rounds() -> None:
    options = AllReduceOptions(rounds=400, sizes=(8192, 16 * 1024 * 1024))
    assert options.schedule == [(8192, 420), (16 * 1024 * 1024, 30)]


@pytest.mark.parametrize(("sealed", "gloo", "ratio"), [(200.0, 100.0, 2.0), (100.0, 300.0, 0.333)])
def test_ratios_are_of_the_same_size(sealed: float, gloo: float, ratio: float) -> None:
    rows = [AllReduceRow(way, 8, us, us, us, 1.0) for way, us in (("sealed", sealed), ("gloo", gloo))]
    assert all_reduce_ratios(rows) == {"p50_8_bytes_sealed_over_gloo": ratio}
