"""A note of work that takes long, and none of work that does not."""

from __future__ import annotations

import pytest

from convoy.cli.show.progress import said_if_slow
from support.waiting import wait_until


def test_slow_work_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    noted = ""

    def is_noted() -> bool:
        nonlocal noted
        noted += capsys.readouterr().err
        return bool(noted)

    with said_if_slow("checking the disk ...", after_s=0.0):
        wait_until(is_noted)
    assert noted + capsys.readouterr().err == "checking the disk ...\n"


def test_quick_or_quiet_work_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    with said_if_slow("quick ...", after_s=60.0), said_if_slow("quiet ...", quiet=True, after_s=0.0):
        pass
    assert capsys.readouterr().err == ""
