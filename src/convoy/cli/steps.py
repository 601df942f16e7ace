"""Flags for how much runs at once: rows of a step, chunks of a prompt, steps in flight, guesses."""

from __future__ import annotations

from typing import Annotated

import typer

MaxBatchFlag = Annotated[
    int | None, typer.Option(min=1, help="Sequences that run at once; 1: one after the other.")
]
PrefillChunkFlag = Annotated[
    int | None, typer.Option(min=1, help="Tokens of one prompt in one step.  [default: 256]")
]
PrefillWindowFlag = Annotated[
    int | None, typer.Option(min=0, help="Chunks of one prompt in flight; 0: as many as micro-batches.")
]
MicroBatchesFlag = Annotated[
    int | None, typer.Option(min=0, help="Steps in flight; 0: as many as there are stages.")
]
SpeculateFlag = Annotated[
    int | None,
    typer.Option(min=0, max=64, help="Tokens guessed at once, from the text so far; 0: none.  [default: 8]"),
]


def given(**flags: int | None) -> dict[str, int]:
    """The keys of [engine] that flags were given for."""
    return {name: value for name, value in flags.items() if value is not None}
