"""`convoy bench hop` as a process: what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.rows import made_up_rows
from cli.transcript import run_convoy
from convoy.bench.hop.hop import HopOptions, ratios_of, size_name
from convoy.bench.hop.pair import HopPair
from convoy.bench.report.percentile import percentile
from convoy.errors import PeerError

SOURCE = str(Path(__file__).resolve().parents[3] / "src")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of one run."""
    done = run_convoy(["bench", "hop", "--rounds", "1", "--json"], tmp_path_factory.mktemp("hop"))
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.long
def test_the_json_has_a_row_for_each_size_and_sealing_and_their_ratios(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "model", "settings", "rows", "ratios"]
    assert (report["bench"], report["model"]) == ("hop", None)
    assert [(row["bytes"], row["sealing"]) for row in report["rows"]] == [
        (size, sealing) for size in (8192, 16777216) for sealing in ("none", "outer", "both")
    ]
    for row in report["rows"]:
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["gb_per_s"] > 0
    rows = {(row["bytes"], row["sealing"]): row for row in report["rows"]}
    added = rows[8192, "both"]["p50_us"] - rows[8192, "none"]["p50_us"]
    assert report["ratios"]["p50_8KiB_both_minus_none_us"] == pytest.approx(added, abs=0.1)


@pytest.mark.long
def test_the_report_names_no_host_and_no_path(report: dict[str, Any]) -> None:
    machine = report["machine"]
    assert os.uname().nodename not in machine.values()
    assert not any(str(value).startswith("/") for value in machine.values())


def test_an_interrupt_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen(
        [sys.executable, "-m", "convoy", "bench", "hop", "--rounds", "1000000"],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert bench.stderr is not None
    children = _wait_for_children(bench)
    bench.send_signal(signal.SIGINT)
    _, errors = bench.communicate(timeout=30)
    assert bench.returncode == 130
    assert b"error" not in errors
    assert not [child for child in children if child.is_running()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_second_process_ends_even_if_the_first_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen(
        [sys.executable, "-m", "convoy", "bench", "hop", "--rounds", "1000000"], env=environment
    )
    children = _wait_for_children(bench)
    bench.kill()
    bench.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_a_second_process_that_cannot_start_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", _script(tmp_path, "echo out of luck >&2; exit 3"))
    with pytest.raises(PeerError, match="exit status 3: out of luck"), HopPair():
        pass


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert percentile([float(i) for i in range(1, 101)], 99) == 99.0
    assert percentile([float(i) for i in range(1, 11)], 99) == 10.0
    assert percentile([7.0], 50) == 7.0


def test_ratios_come_from_the_rows_of_one_run() -> None:
    ratios = ratios_of(made_up_rows())
    assert ratios["p50_8KiB_both_minus_none_us"] == 90.0
    assert ratios["p50_8KiB_outer_minus_none_us"] == 30.0
    assert ratios["gb_per_s_16MiB_both_over_none"] == 0.25
    assert ratios["gb_per_s_16MiB_both_over_outer"] == 0.5


def test_large_tensors_get_fewer_rounds_but_never_fewer_than_five() -> None:
    assert HopOptions(rounds=400).rounds_of(16 << 20) == 10
    assert HopOptions(rounds=1).rounds_of(16 << 20) == 5
    assert HopOptions(rounds=1).rounds_of(8 << 10) == 1
    assert size_name(8192) == "8KiB"


def _wait_for_children(bench: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the second process, once it is connected all three ways (two connections each)."""
    process = psutil.Process(bench.pid)
    while bench.poll() is None:
        children = process.children()
        links = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
        if children and len(links) == 6:
            return list(children)
    raise AssertionError(f"the bench ended with {bench.returncode}")


def _script(directory: Path, text: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)
