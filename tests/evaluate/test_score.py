"""Comparing answers and counting them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from convoy.evaluate.questions import Question
from convoy.evaluate.score import Scoreboard, ScoredAnswer, ScoreResult, ask_all, is_right


@pytest.mark.parametrize(
    ("answer", "right"),
    [("166", True), (" 166\n", True), ("166.", False), ("0166", False), ("", False), ("1 66", False)],
)
def test_only_the_exact_answer_is_right(answer: str, right: bool) -> None:
    assert is_right(answer, "166") == right


def ask(question: Question) -> ScoredAnswer:
    return ScoredAnswer(" 2 " if question.text == "1+1?" else "no idea", num_tokens=3, duration_s=0.5)


def test_scores_add_up_by_kind_and_over_all() -> None:
    questions = [Question("sum", "1+1?", "2"), Question("sum", "1+2?", "3"), Question("word", "1+1?", "2")]
    board = Scoreboard()
    for result in ask_all(questions, ask):
        board.add(result)
    assert [(kind, score.right, score.total) for kind, score in board.kinds.items()] == [
        ("sum", 1, 2),
        ("word", 1, 1),
    ]
    assert (board.overall.right, board.overall.total, board.overall.num_tokens) == (2, 3, 9)
    assert board.overall.fraction == pytest.approx(2 / 3)
    assert board.overall.tokens_per_s == pytest.approx(6)


def test_an_empty_scoreboard_divides_by_nothing() -> None:
    assert Scoreboard().overall.fraction == 0
    assert Scoreboard().overall.tokens_per_s == 0


def test_several_questions_at_once_give_the_same_results_in_order() -> None:
    questions = [Question("n", str(number), str(number % 7)) for number in range(50)]
    both = threading.Barrier(2, timeout=60)

    def slow(question: Question) -> ScoredAnswer:
        both.wait()  # passes only where two are asked at once
        return ScoredAnswer(question.text, 1, 0.0)

    with ThreadPoolExecutor(2) as pool:
        results = list(ask_all(questions, slow, pool.map))
    assert [result.question for result in results] == questions
    assert sum(result.right for result in results) == 7


def test_the_digest_tells_different_answers_apart_but_not_orders() -> None:
    results = [
        ScoreResult(Question("k", str(n), "x"), ScoredAnswer(f"a{n}", 1, 0.1 * n), right=False)
        for n in range(3)
    ]
    changed = ScoreResult(results[0].question, ScoredAnswer("b", 1, 0.1), right=False)

    def digest(*some: ScoreResult) -> str:
        board = Scoreboard()
        for result in some:
            board.add(result)
        return board.digest

    assert digest(*results) == digest(*reversed(results))
    assert digest(*results) != digest(changed, *results[1:])


def test_results_come_while_later_questions_are_still_to_be_asked() -> None:
    asked: list[str] = []

    def noting(question: Question) -> ScoredAnswer:
        asked.append(question.text)
        return ScoredAnswer("", 0, 0.0)

    results = ask_all([Question("k", str(number), "x") for number in range(3)], noting)
    next(results)
    assert asked == ["0"]
