"""The reference of the commands: it is current, complete, and the same on every machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import commands

ROOT = Path(__file__).resolve().parents[2]


def run_script(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/commands.py", "--check"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_page_is_current() -> None:
    assert commands.PAGE.read_text(encoding="utf-8") == commands.write_page()


def test_the_page_depends_on_neither_terminal_nor_home(tmp_path: Path) -> None:
    done = run_script(COLUMNS="40", TERM="dumb", HOME=str(tmp_path), CONVOY_API_KEY="of-this-test")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_page_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "commands.md"
    page.write_text(commands.write_page().replace("--members", "--people"), encoding="utf-8")
    monkeypatch.setattr(commands, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["commands.py", "--check"])
    assert commands.main() == 1
    assert "run `python scripts/commands.py`" in capsys.readouterr().err


def test_every_option_of_a_help_page_is_in_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "convoy", "serve", "--help"], capture_output=True, text=True, check=True
    )
    options = set(re.findall(r"^ {2}(?:-\w, )?(--[\w-]+)", done.stdout, re.MULTILINE)) - {"--help"}
    section = commands.write_page().split("### convoy serve\n")[1].split("\n### ")[0]
    assert len(options) > 30
    assert {
        option for option in options if f"`{option} " not in section and f"`{option}`" not in section
    } == set()


def test_default_and_limits_leave_the_meaning() -> None:
    page = commands.write_page()
    assert "| `--max-tokens <int>` | With --prompt: the most tokens of the answer. | `256` |  |" in page
    assert not re.search(r"\[default|\[x>=", page)
