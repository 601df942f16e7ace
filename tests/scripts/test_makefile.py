"""`make test` has two halves, and a failure in the first one must not hide those of the second."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  *--unit*) echo unit; exit {unit};;
  *) echo others; exit {others};;
esac
"""


@pytest.mark.parametrize(("unit", "others"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_both_halves_run_and_either_one_fails_the_target(tmp_path: Path, unit: int, others: int) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON.format(unit=unit, others=others), encoding="utf-8")
    python.chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    # -o: the set-up is there.
    done = subprocess.run(
        [make, "-s", "-o", "setup", f"BIN={tmp_path}", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["unit", "others"], done.stderr
    assert (done.returncode != 0) == bool(unit or others)
