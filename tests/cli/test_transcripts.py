"""Every transcript beside this file, through the code of the entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.transcript import matches, play, read_transcript
from support.cases import cases

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))
# `convoy bench comms` measures smaller hops in tests/e2e/test_bench.py.
SLOW = {"bench_hop"}


@pytest.mark.parametrize(
    "file", cases(TRANSCRIPTS, lambda file: file.stem not in SLOW), ids=lambda file: file.stem
)
def test_the_command_line_does_what_its_transcript_says(file: Path, tmp_path: Path) -> None:
    commands = read_transcript(file.read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        wrong = play(command, tmp_path)
        assert not wrong, "\n".join([file.name, *wrong])


def test_a_pattern_must_match_every_line_in_order() -> None:
    assert matches(["a+", "b"], ["aa", "b"])
    assert matches(["...", "b"], ["x", "y", "b"])
    assert matches(["a", "..."], ["a"])
    assert matches([], [])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["b", "a"], ["a", "b"])
    assert not matches(["a"], [])
    assert not matches([], ["a"])


def test_a_line_outside_the_grammar_of_transcripts_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2"):
        read_transcript("$ convoy\nstdout| x")
