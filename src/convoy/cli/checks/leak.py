"""``convoy verify --leak``: show how much of a prompt a peer can recover from its activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.show.output import format_seconds, plain, print_json, print_table
from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.evaluate.leak import LeakReport, Progress
    from convoy.model.checkpoints.source import ModelSource
    from convoy.plan.spec.model import ModelSpec

LEAK_TOKENS = 26
LEAK_DEPTHS = "some"
_MAX_TOKENS, _MAX_TEXT = 1024, 4096

LeakFlag = Annotated[
    bool, typer.Option("--leak", help="Recover a prompt from the activations after some layers.")
]
LeakTokensFlag = Annotated[
    int, typer.Option(min=1, max=_MAX_TOKENS, help="Tokens of the first prompt to recover with --leak.")
]
LeakDepthsFlag = Annotated[
    str, typer.Option(help="Layers before the cut: all, numbers such as 1,6,11, or some for three of them.")
]


@dataclass(frozen=True)
class LeakSearch:
    """Hold the flags. ``depths`` is the text of its flag."""

    kernel: str
    device: str
    num_threads: int | None
    num_tokens: int
    depths: str


def show_leak(
    source: ModelSource,
    prompt: Sequence[int],
    search: LeakSearch,
    ranks: int,
    progress: Progress,
    *,
    as_json: bool,
) -> None:
    """Run the search and print a row for each depth, or one JSON value. The exit code is always 0."""
    from convoy.evaluate.leak import LeakOptions, leak

    if ranks > 1:
        raise UsageError(f"--leak came with --ranks {ranks}, expected one rank", hint="leave out --ranks")
    depths = _depths(search.depths, source.spec)
    options = LeakOptions(search.kernel, depths, search.num_threads, search.device)
    found = leak(source, prompt[: search.num_tokens], options, progress)
    print_json(plain(found)) if as_json else _print(found)


def _depths(text: str, spec: ModelSpec) -> tuple[int, ...]:
    from convoy.evaluate.cuts import allowed_cuts
    from convoy.evaluate.leak import default_depths

    if text in {LEAK_DEPTHS, "all"}:
        return default_depths(spec) if text == LEAK_DEPTHS else tuple(allowed_cuts(spec))
    words = text.split(",") if len(text) <= _MAX_TEXT else []
    if not words or not all(word.isascii() and word.isdigit() and len(word) < 7 for word in words):
        raise UsageError(
            f"--leak-depths is {text[:63]!r}, expected some, all, or numbers such as 1,6,11",
            hint="--leak-depths some",
        )
    return tuple(map(int, words))


def _print(found: LeakReport) -> None:
    print(
        f"{found.model}: {found.num_layers} layers, {found.kernel}; a prompt of {found.num_tokens} tokens, "
        f"each of {found.vocab_size} tried"
    )
    print_table(
        ("layers before the cut", "the peer gets", "recovered", "seconds per token", "ties"),
        [
            (
                f"0-{row.depth - 1}",
                row.reads,
                f"{row.recovered} of {row.num_tokens}",
                format_seconds(row.seconds_per_token),
                row.ties,
            )
            for row in found.depths
        ],
    )
    print(f"seconds per token are {found.bound}")
    if any(row.ties for row in found.depths):
        print("ties: positions at which activations of several tokens are as near; the lowest token counts")
