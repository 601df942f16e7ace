"""Questions files: the lines that are read, and the name of a bad line in the error."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.evaluate.questions import BUNDLED_QUESTIONS, Question, load_questions, take

GOOD = {"kind": "sum", "question": "1+1?", "answer": "2"}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_questions_are_read_line_by_line_and_blank_lines_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "", {**GOOD, "kind": "\u2028odd", "extra": 1}, "  ")
    assert load_questions(path) == (Question("sum", "1+1?", "2"), Question("\u2028odd", "1+1?", "2"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ([1], "line 2 is not an object with kind, question, answer"),
        ({"kind": "sum", "question": "1+1?"}, "line 2 has no text under 'answer'"),
        ({**GOOD, "answer": 2}, "line 2 has no text under 'answer'"),
        ({**GOOD, "question": " "}, "line 2 has no text under 'question'"),
        ({**GOOD, "kind": None}, "line 2 has no text under 'kind'"),
    ],
)
def test_a_bad_line_is_named(line: object, expected: str, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, line)
    with pytest.raises(InputError) as caught:
        load_questions(path)
    assert str(caught.value) == f"{path} {expected}"


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read questions from .*gone.jsonl: No such file"):
        load_questions(tmp_path / "gone.jsonl")
    with pytest.raises(InputError, match="cannot read questions"):
        load_questions(tmp_path)
    with pytest.raises(InputError, match="holds no questions"):
        load_questions(written(tmp_path, "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"kind": "\xe9"}')
    with pytest.raises(InputError, match="is not UTF-8 at byte 10"):
        load_questions(tmp_path / "latin.jsonl")


def test_the_bundled_questions_are_400_of_at_least_eight_kinds() -> None:
    questions = load_questions(BUNDLED_QUESTIONS)
    assert len(questions) == 400
    assert len({question.kind for question in questions}) >= 8
    assert len({question.text for question in questions}) == 400


def test_a_short_run_asks_of_every_kind() -> None:
    questions = load_questions(BUNDLED_QUESTIONS)
    kinds = Counter(question.kind for question in questions)
    few = take(questions, 2 * len(kinds))
    assert set(Counter(question.kind for question in few).values()) == {2}
    assert Counter(take(questions, None)) == Counter(questions)
    assert take(questions, 10**6) == take(questions, None)
