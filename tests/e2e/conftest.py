"""Fixtures of the tests that a user could have typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from convoy.cli.main import run
from e2e.bench_verb import REPORT, Bench


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    """Give bench(verb, ...): the output of `convoy bench verb ... --json`, typed in this process."""
    threads = torch.get_num_threads()

    def say(verb: str, *arguments: str) -> dict[str, Any]:
        code = run(["bench", verb, *arguments, "--json"])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        report: dict[str, Any] = json.loads(shown.out)
        assert list(report) == REPORT
        assert report["bench"] == verb
        return report

    yield say
    torch.set_num_threads(threads)
