"""``convoy eval``: ask a split model questions with one right answer, and print a table by kind."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.local.members import LayersFlag
from convoy.cli.serve import start_cluster
from convoy.cli.show.output import JsonFlag, print_json, print_table
from convoy.errors import ConvoyError, UsageError
from convoy.sdk.local_cluster import LocalCluster, LocalOptions

if TYPE_CHECKING:
    from convoy.cluster.running import RunningCluster
    from convoy.evaluate.questions import Question
    from convoy.evaluate.score import Score, Scoreboard, ScoredAnswer

_MAX_TOKENS = 64
_AT_ONCE = 16


# Named after the finding, as the other errors are.
class ScoreTooLow(ConvoyError):  # noqa: N818
    """Report a score below `--at-least`."""


def evaluate(
    model: Annotated[
        str, typer.Argument(help="demo, demo-mini, a Hugging Face directory or synthetic:NAME.")
    ],
    questions: Annotated[
        Path | None, typer.Option(help="JSON lines of kind, question, answer.  [default: the bundled 400]")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Ask only this many questions, equally of every kind.")
    ] = None,
    members: Annotated[int, typer.Option(help="Processes on this machine; the first is the head.")] = 2,
    layers: LayersFlag = None,
    at_least: Annotated[float, typer.Option(help="Exit 1 below this score, from 0 to 1.")] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Score a model on questions with one right answer each."""
    from convoy.evaluate.questions import BUNDLED_QUESTIONS, load_questions, take
    from convoy.model.checkpoints.source import ModelSource

    if not 0 <= at_least <= 1:
        raise UsageError(f"--at-least is {at_least:g}, expected 0 to 1", hint="--at-least 0.9")
    asked = take(load_questions(questions or BUNDLED_QUESTIONS), limit)
    options = LocalOptions(members, layers)
    options.check(ModelSource.resolve(model).spec)
    with LocalCluster(options) as local:
        local.start_peers(model)
        try:
            cluster = start_cluster(local.config(local.head), model, quiet=as_json, watch=local.check_alive)
            try:
                board, seconds = _ask_all(cluster, asked, live=not as_json)
            finally:
                cluster.close()
        except ConvoyError as error:
            local.reraise(error)
    _print(model, members, board, seconds, as_json=as_json)
    if board.overall.fraction < at_least:
        raise ScoreTooLow(f"the score is {board.overall.fraction:.3f}, expected at least {at_least:g}")


def _ask_all(
    cluster: RunningCluster, questions: tuple[Question, ...], *, live: bool
) -> tuple[Scoreboard, float]:
    from convoy.evaluate.score import Scoreboard, ask_all

    board = Scoreboard()
    started = time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for result in ask_all(questions, lambda question: _ask(cluster, question), pool.map):
            board.add(result)
            if live and sys.stderr.isatty():
                overall = board.overall
                text = f"\r{overall.total}/{len(questions)} asked, {overall.right} right"
                print(text, end="", file=sys.stderr, flush=True)
    if live and sys.stderr.isatty():
        print(file=sys.stderr)
    return board, time.monotonic() - started


def _ask(cluster: RunningCluster, question: Question) -> ScoredAnswer:
    from convoy.engine.completion import generate
    from convoy.engine.requests.request import GenerationRequest
    from convoy.evaluate.score import ScoredAnswer
    from convoy.model.sampling.params import SamplingParams

    prompt = cluster.tokenizer.encode_chat([{"role": "user", "content": question.text}])
    request = GenerationRequest(tuple(prompt), SamplingParams(temperature=0.0), max_tokens=_MAX_TOKENS)
    answer = generate(cluster.engine, request)
    return ScoredAnswer(answer.text, len(answer.token_ids), answer.total_s)


def _print(model: str, members: int, board: Scoreboard, seconds: float, *, as_json: bool) -> None:
    overall = board.overall
    rate = overall.num_tokens / seconds if seconds > 0 else 0.0
    if as_json:
        print_json(
            {
                "model": model,
                "members": members,
                "score": overall.fraction,
                "right": overall.right,
                "total": overall.total,
                "runtime_s": seconds,
                "tokens_per_s": rate,
                "answers_digest": board.digest,
                "kinds": {kind: _facts(score) for kind, score in board.kinds.items()},
            }
        )
        return
    rows = [(kind, score.right, score.total, f"{score.fraction:.3f}") for kind, score in board.kinds.items()]
    rows.append(("all", overall.right, overall.total, f"{overall.fraction:.3f}"))
    print_table(("kind", "right", "asked", "score"), rows)
    print(f"{seconds:.1f} s, {rate:.0f} tokens/s, {members} members, answers {board.digest[:12]}")


def _facts(score: Score) -> dict[str, object]:
    return {"right": score.right, "total": score.total, "score": score.fraction}
