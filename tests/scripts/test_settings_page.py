"""The tables of keys in docs/configuration.md are those of the table of settings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import settings
from convoy.config.table import TABLES, rows


def test_the_page_is_current() -> None:
    page = settings.PAGE.read_text(encoding="utf-8")
    assert settings.write_page(page) == page


def test_every_key_has_a_line() -> None:
    page = settings.write_tables()
    for table in TABLES:
        section = page.split(f"### [{table}]\n")[1].split("\n### ")[0]
        for row in rows(table):
            assert f"| `{row.key}` |" in section


def test_an_old_page_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    current = settings.PAGE.read_text(encoding="utf-8")
    page = tmp_path / "configuration.md"
    page.write_text(current.replace("| `8765` |", "| `8766` |"), encoding="utf-8")
    monkeypatch.setattr(settings, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["settings.py", "--check"])
    assert settings.main() == 1
    assert "run `python scripts/settings.py`" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["settings.py"])
    assert settings.main() == 0
    assert page.read_text(encoding="utf-8") == current
