"""Flags of several verbs: the amount of work at once, and how members share a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

from convoy.cli.flags.http import HTTP_FLAGS, serve_settings
from convoy.cli.flags.table import flag, option
from convoy.config.table import row
from convoy.errors import UsageError

_ENGINE = (
    *("max_batch", "prefill_chunk", "prefill_window", "micro_batches", "speculate", "max_model_len"),
    "kv_dtype",
)
_FLAGS = {
    "engine": {key: flag("engine", key) for key in _ENGINE},
    "sharing": {key: flag("plan", key) for key in ("parallel", "ranks")},
    "waiting": {key: flag("plan", key) for key in ("wait_s", "recover_wait_s")},
    "listens": HTTP_FLAGS,
}

# For verbs without the other flags of [engine].
KvDtypeFlag = Annotated[str | None, option("engine", "kv_dtype")]


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
        check_choice("plan", "parallel", given.get("sharing", {}).get("parallel"))
        check_choice("engine", "kv_dtype", given.get("engine", {}).get("kv_dtype"))
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


def check_choice(table: str, key: str, text: str | None) -> None:
    """Raise UsageError for an unknown value of the flag of a setting with a closed set of values."""
    known = row(table, key).choices
    if text is not None and text not in known:
        raise UsageError(f"--{key.replace('_', '-')} is {text}, expected {', '.join(known)}")
