"""Tables, JSON and errors as people and scripts read them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from convoy.cli.show.output import (
    counted,
    format_bytes,
    format_seconds,
    has_colour,
    one_line,
    plain,
    print_table,
    report_error,
)


@dataclass
class Point:
    x: int
    where: Path


class Shape(msgspec.Struct):
    points: tuple[Point, ...]
    key: bytes


def test_values_become_plain_json() -> None:
    assert plain(Shape((Point(1, Path("a/b")),), b"\x00\xff")) == {
        "points": [{"x": 1, "where": "a/b"}],
        "key": "AP8=",
    }
    assert plain({1: {2.5, None}}) in ({"1": [2.5, None]}, {"1": [None, 2.5]})
    with pytest.raises(TypeError, match="object has no JSON form"):
        plain(object())


def test_tables_align_numbers_right_and_show_nothing_as_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("alpha", "1.5 MB", "127.0.0.1:7001", None), ("b", "20 B", "10.0.0.1:1", 3)]
    print_table(["member", "weights", "address", "n"], rows)
    assert capsys.readouterr().out.splitlines() == [
        "member  weights  address         n",
        "alpha    1.5 MB  127.0.0.1:7001  -",
        "b          20 B  10.0.0.1:1      3",
    ]


def test_an_empty_table_is_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [])
    assert capsys.readouterr().out == "a  b\n"


def test_quantities_have_units() -> None:
    assert [format_bytes(n) for n in (0, 999, 1_500_000)] == ["0 B", "999 B", "1.5 MB"]
    assert [format_seconds(s) for s in (0.00031, 2.5, None)] == ["0.31 ms", "2.50 s", None]


def test_one_thing_is_not_several() -> None:
    assert [counted(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_an_error_is_two_lines_and_in_json_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    report_error("StepError", "no\nroom\x1b[2J", "make\r\nroom", as_json=True, extra={"param": "n"})
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["error: no room [2J", "hint: make  room"]
    error = json.loads(captured.out)["error"]
    assert (error["type"], error["hint"], error["param"]) == ("StepError", "make\r\nroom", "n")


def test_control_characters_never_reach_the_terminal() -> None:
    assert one_line("a\x1b]0;title\x07b\u202ec\n") == "a ]0;title b c"


class Terminal(io.StringIO):
    """Write to a stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_whose_owner_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(Terminal())
