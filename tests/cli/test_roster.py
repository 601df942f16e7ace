"""Files that are no roster, shown to `convoy roster`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.transcript import run_here


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe", b"epoch = ", b"epoch = " + b"9" * 5000, b"a = " + b"[" * 5000],
    ids=["not text", "cut off", "a number of 5,000 digits", "5,000 brackets"],
)
def test_what_is_not_toml_is_refused_with_the_command_to_write_one(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "roster.toml").write_bytes(data)
    done = run_here(["roster", "show", "roster.toml"], tmp_path)
    assert done.returncode == 78
    assert done.stderr.splitlines() == [
        "error: roster.toml is not TOML, so it is no roster",
        "hint: `convoy roster new` writes a roster",
    ]
