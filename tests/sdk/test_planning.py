"""`convoy.plan` on the bundled models: the value that `convoy plan --json` prints."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import convoy
from cli.transcript import run_here
from convoy.errors import PlanError, UsageError

# So that nothing is measured.
TOLD = ("--speed", "10,100")


def test_a_plan_is_the_value_that_the_command_prints(tmp_path: Path) -> None:
    found = convoy.plan("demo", members={"alpha": 0.5, "beta": 0.5}, kernel="plain-f32", measure=False)
    assert [(stage.member, stage.span) for stage in found.stages] == [
        ("alpha", "0:5,output"),
        ("beta", "6:11"),
    ]
    assert found.rates is None
    (tmp_path / "plain.toml").write_text('[model]\nkernel = "plain-f32"\n')
    asked = ["plan", "demo", "--members", "alpha=0.5,beta=0.5", "--config", "plain.toml", *TOLD, "--json"]
    shown = json.loads(run_here(asked, tmp_path).stdout)
    assert shown["stages"] == [msgspec.structs.asdict(stage) for stage in found.stages]


def test_members_that_cannot_hold_the_model_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"needs .* MB for .* but has"):
        convoy.plan("demo", members={"alpha": 0.01}, measure=False)


def test_a_plan_needs_a_model() -> None:
    with pytest.raises(UsageError, match="no model is named"):
        convoy.plan()
