"""The times of starts: each is of a process that ran to its end, with its aim beside it."""

from __future__ import annotations

import re

import pytest

from compare import app
from comparisons.verbs.start import STARTS, measure_start
from convoy.cli.main import run

WORK = "import time\nwhile time.process_time() < 0.2: pass"


def test_every_start_is_printed_with_its_aim(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["start", "--rounds", "1"], app) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:14].rstrip() for line in lines] == list(STARTS)
    aims = [re.fullmatch(r"\d+\.\d{3} s(?:, aim (\S+) s)?", line[15:]) for line in lines]
    assert [aim and aim[1] for aim in aims] == [None, "0.1", "0.25"]


def test_work_counts_and_a_start_that_fails_has_no_time() -> None:
    assert measure_start(("-c", WORK), 1) >= 0.2
    with pytest.raises(OSError, match="ended with 3, expected 0"):
        measure_start(("-c", "raise SystemExit(3)"), 1)
