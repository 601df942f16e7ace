"""Flags for how much runs at once: rows of a step, chunks of a prompt, steps in flight, guesses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

MaxBatchFlag = Annotated[
    int | None, typer.Option(min=1, help="Sequences that run at once; 1: one after the other.")
]
PrefillChunkFlag = Annotated[
    int | None, typer.Option(min=1, help="Tokens of one prompt in one step.  [default: 256]")
]
PrefillWindowFlag = Annotated[
    int | None, typer.Option(min=0, help="Chunks of one prompt in flight, 1 to 64; 0: as micro-batches.")
]
MicroBatchesFlag = Annotated[
    int | None, typer.Option(min=0, help="Steps in flight, 1 to 64; 0: as many as there are stages.")
]
SpeculateFlag = Annotated[
    int | None,
    typer.Option(min=0, max=64, help="Tokens guessed at once, from the text so far; 0: none.  [default: 8]"),
]


_FLAGS = {
    "max_batch": MaxBatchFlag,
    "prefill_chunk": PrefillChunkFlag,
    "prefill_window": PrefillWindowFlag,
    "micro_batches": MicroBatchesFlag,
    "speculate": SpeculateFlag,
}


def with_step_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb these flags in place of its parameter ``engine``: the keys of [engine] that were given."""

    @functools.wraps(verb)
    def command(**given: Any) -> None:
        asked = {name: given.pop(name) for name in _FLAGS}
        verb(**given, engine={name: value for name, value in asked.items() if value is not None})

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        if parameter.name != "engine":
            parameters.append(parameter.replace(kind=kind))
            continue
        parameters += [
            inspect.Parameter(name, kind, default=None, annotation=annotation)
            for name, annotation in _FLAGS.items()
        ]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    del command.__dict__["__wrapped__"]
    return command
