"""Flags of several verbs: the amount of work at once, and how members share a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from convoy.cli.flags.http import HTTP_FLAGS, serve_settings
from convoy.errors import UsageError
from convoy.plan.placement.parallel import ASKED

MaxBatchFlag = Annotated[
    int | None, typer.Option(min=1, help="Sequences that run at once; 1: one after another.")
]
PrefillChunkFlag = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens of one prompt in one step.  [default: 256; 2048 where all stages are on CUDA]"
    ),
]
PrefillWindowFlag = Annotated[
    int | None, typer.Option(min=0, help="Chunks of one prompt in flight, 1 to 64; 0: as --micro-batches.")
]
MicroBatchesFlag = Annotated[
    int | None, typer.Option(min=0, help="Steps in flight, 1 to 64; 0: as many as there are stages.")
]
MaxModelLenFlag = Annotated[
    int | None,
    typer.Option(min=1, help="Longest prompt and answer together, in tokens.  [default: the model's own]"),
]
SpeculateFlag = Annotated[
    int | None,
    typer.Option(min=0, max=64, help="Tokens guessed at once, from the text so far; 0: none.  [default: 8]"),
]
ParallelFlag = Annotated[
    str | None,
    typer.Option(help="How members share the model: auto, pipeline, tensor or single.  [default: auto]"),
]
RanksFlag = Annotated[
    int | None,
    typer.Option(min=2, max=16, help="Members that hold each stage together.  [default: as many as can]"),
]


WaitFlag = Annotated[
    float | None,
    typer.Option(
        "--wait",
        min=0,
        help="Seconds to wait for absent members before a start without them; 0: none.  [default: 60]",
    ),
]
RecoverWaitFlag = Annotated[
    float | None,
    typer.Option("--recover-wait", min=0, help="Seconds to wait for a lost member to return.  [default: 60]"),
]

_FLAGS = {
    "engine": {
        "max_batch": MaxBatchFlag,
        "prefill_chunk": PrefillChunkFlag,
        "prefill_window": PrefillWindowFlag,
        "micro_batches": MicroBatchesFlag,
        "speculate": SpeculateFlag,
        "max_model_len": MaxModelLenFlag,
    },
    "sharing": {"parallel": ParallelFlag, "ranks": RanksFlag},
    "waiting": {"wait_s": WaitFlag, "recover_wait_s": RecoverWaitFlag},
    "listens": HTTP_FLAGS,
}


def with_step_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb these flags for its parameters ``engine``, ``sharing``, ``waiting`` and ``listens``.

    Each parameter gets the given keys of [engine], [plan] or [serve].
    """
    own = inspect.signature(verb, eval_str=True).parameters

    @functools.wraps(verb)
    def command(**given: Any) -> None:
        for group in _FLAGS.keys() & own.keys():
            asked = {name: given.pop(name) for name in _FLAGS[group]}
            given[group] = {name: value for name, value in asked.items() if value is not None}
        if "listens" in given:
            given["listens"] = serve_settings(given["listens"])
        check_parallel(given.get("sharing", {}).get("parallel"))
        verb(**given)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    for parameter in own.values():
        if parameter.name not in _FLAGS:
            parameters.append(parameter.replace(kind=kind))
            continue
        parameters += [
            inspect.Parameter(name, kind, default=None, annotation=annotation)
            for name, annotation in _FLAGS[parameter.name].items()
        ]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    # `inspect` would follow __wrapped__ to the verb's own signature.
    del command.__dict__["__wrapped__"]
    return command


def check_parallel(text: str | None) -> None:
    """Raise UsageError for an unknown value of ``--parallel``."""
    if text is not None and text not in ASKED:
        raise UsageError(f"--parallel is {text}, expected {', '.join(ASKED)}")
