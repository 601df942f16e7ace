"""``convoy quantize``: what it prints, and what it refuses before it reads a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convoy.cli import main
from convoy.cli.show.exit_codes import EXIT_USAGE


def test_the_verb_prints_fields_or_one_json_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["quantize", "demo-mini", "--format", "q4", "--out", str(tmp_path / "q4")]) == 0
    text = capsys.readouterr().out
    assert "demo-mini" in text
    assert "down_proj" in text
    arguments = ["quantize", "demo-mini", "--format", "q8", "--out", str(tmp_path / "q8"), "--json"]
    assert main.run(arguments) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert value["record"]["format"] == "q8"
    assert value["record"]["bytes_after"] < value["record"]["bytes_before"]
    assert value["record"]["kinds"]["down_proj"]["error"] < 0.01
    assert value["duration_s"] > 0
    assert captured.err == ""
    assert main.run(arguments) == EXIT_USAGE
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UsageError"


def test_an_unknown_format_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["quantize", "demo-mini", "--format", "q5", "--out", str(tmp_path / "out")]) == 2
    assert "--format" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
