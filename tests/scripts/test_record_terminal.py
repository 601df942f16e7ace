"""Recordings of a terminal: the picture shows the real output, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import record_terminal
from record_terminal import record, shorten_pauses, wrap, write_svg

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def test_a_command_is_recorded_without_control_sequences() -> None:
    program = r"import os; print('\x1b[1mbold\x1b[0m', os.get_terminal_size().columns); print('old\rnew')"
    lines, code = record([sys.executable, "-c", program], 90)
    assert ([text for _, text in lines], code) == (["bold 90", "new"], 0)


def test_a_command_that_fails_gives_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.svg"
    monkeypatch.setattr(sys, "argv", ["record_terminal.py", str(file), "--", sys.executable, "-c", "exit(3)"])
    assert record_terminal.main() == 1
    assert not file.exists()
    assert "ended with exit code 3, expected 0" in capsys.readouterr().err


def test_long_lines_are_folded_and_empty_ones_stay() -> None:
    assert wrap([(1.0, "abcdef"), (2.0, "")], 4) == [(1.0, "abcd"), (1.0, "ef"), (2.0, "")]


def test_long_pauses_are_cut() -> None:
    assert shorten_pauses([0.5, 9.5, 9.75]) == pytest.approx([0.5, 1.7, 1.95])


def test_text_cannot_become_markup() -> None:
    picture = write_svg("echo '<a>'", [(0.1, '<b> & "c"')], 40)
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["$ echo '<a>'", '<b> & "c"']


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_xml_and_loads_nothing(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    ElementTree.fromstring(text)  # noqa: S314 - our own
    assert not re.search(r"@font-face|@import|<script|<image|url\((?!#)|href=\"(?!#)", text)


def test_every_drawing_has_colours_for_light_and_for_dark_pages() -> None:
    drawings = list(PICTURES.glob("*.svg"))
    assert len(drawings) > 1
    assert [one.name for one in drawings if "prefers-color-scheme" not in one.read_text("utf-8")] == []
