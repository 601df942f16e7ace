"""The example in docs/sessions.md runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.served import ENVIRONMENT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sessions.md"


@pytest.mark.slow
def test_the_example_of_sessions_runs_as_it_stands(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 1
    (tmp_path / "example.py").write_text(examples[0])
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
