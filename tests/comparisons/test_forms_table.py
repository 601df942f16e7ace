"""The table of forms: a line for each form and number of members, with the other program's rate beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comparisons.forms_table import main


def rate(form: str, through: str, members: int, tokens_per_s: float, times: float = 0.0) -> dict[str, Any]:
    return {
        "form": form,
        "through": through,
        "members": members,
        "what": "decode",
        "number": 4,
        "tokens_per_s": tokens_per_s,
        "times": times,
    }


def test_a_line_has_memory_and_both_rates_of_its_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"form": "Q4_0", "stored_bytes": 1, "resident_bytes": 146_900_000}
    first = [size, rate("Q4_0", "llama.cpp", 1, 50.2), rate("Q4_0", "stage", 1, 60.4, 1.23)]
    second = [rate("Q4_0", "llama.cpp", 2, 8.04), rate("Q4_0", "engine", 2, 16.0, 2.0)]
    files = []
    for number, rows in enumerate((first, second)):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"rows": rows}))
    main(map(str, files))
    assert capsys.readouterr().out.splitlines() == [
        "| form | members | memory | decode 4 |",
        "| --- | ---: | ---: | ---: |",
        "| Q4_0 | 1 | 147 MB | 60 / 50 (1.23) |",
        "| Q4_0 | 2 |  | 16 / 8.0 (2.00) |",
    ]
