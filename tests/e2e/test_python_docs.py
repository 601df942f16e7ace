"""The example in docs/sessions.md runs as it stands, and prints what the page says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sessions.md"


@pytest.mark.long
def test_the_example_of_sessions_runs_as_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, threads = PAGE.read_text("utf-8"), torch.get_num_threads()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    printed = re.findall(r"^It prints:\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == len(printed) == 1
    (tmp_path / "example.py").write_text(examples[0])
    try:
        runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out == printed[0]
