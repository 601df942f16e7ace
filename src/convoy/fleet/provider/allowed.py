"""Rebuild a request for the provider's engine from the fields of a list, each with its type.

Engines take fields that reach beyond an answer: addresses to fetch from, slots and priorities of other
requests, switches of their caches, templates that they run. None of them is in the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from convoy.api.body.fields import HARMLESS, HARMLESS_OF, Endpoint
from convoy.errors import RequestError
from convoy.fleet.consumer_request import ConsumerRequest, fields_of

# Characters of a name or an id.
_MAX_TEXT = 256
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Short = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
Ids = Annotated[list[Int], msgspec.Meta(max_length=100_000)]
Words = Annotated[list[str], msgspec.Meta(max_length=1000)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Be the base of the values inside a field."""


class TextPart(Strict, frozen=True):
    """Hold a part of a message. Other types name addresses that an engine would fetch."""

    type: Literal["text"]
    text: str


class AllowedCallFunction(Strict, frozen=True):
    name: Short
    arguments: str = ""


class AllowedCall(Strict, frozen=True):
    function: AllowedCallFunction
    id: Short = ""
    type: Literal["function"] | None = None
    index: Int | None = None


class AllowedMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold one turn.

    Other fields that clients send back of an answer (refusals, annotations) are left out.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: Short | None = None
    tool_calls: list[AllowedCall] | None = None
    tool_call_id: Short | None = None


class AllowedFunction(Strict, frozen=True):
    name: Short
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(Strict, frozen=True):
    type: Literal["function"]
    function: AllowedFunction


class AllowedChoiceFunction(Strict, frozen=True):
    name: Short


class AllowedChoice(Strict, frozen=True):
    type: Literal["function"]
    function: AllowedChoiceFunction


class AllowedSchema(Strict, frozen=True):
    name: Short
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class AllowedFormat(Strict, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: AllowedSchema | None = None


class AllowedStreamOptions(Strict, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class TemplateSwitches(Strict, frozen=True):
    """Hold the variables of a chat template that switch thinking, and no others."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class AllowedBlock(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold a block of a Messages request. Its other fields, such as sources of images, are left out."""

    type: Short
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: Short | None = None
    name: Short | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Short | None = None
    content: str | list[AllowedBlock] | None = None
    is_error: bool | None = None


class AllowedTurn(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AllowedBlock]


class AllowedMessageTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold a tool. Only those that the client runs are passed on: an engine may run the others."""

    type: Short | None = None
    name: Short | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedMessageChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Short | None = None
    disable_parallel_tool_use: bool | None = None


class AllowedThinking(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None


class AllowedForm(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class AllowedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    effort: Short | None = None
    format: AllowedForm | None = None


_NUMBERS = (
    *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "mirostat_tau", "mirostat_eta", "dynatemp_range"),
    *("dry_multiplier", "dry_base", "xtc_probability", "xtc_threshold"),
)
_WHOLE = (
    *("max_tokens", "n", "best_of", "top_k", "min_tokens", "top_logprobs", "prompt_logprobs"),
    *("mirostat", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n"),
)
_SWITCHES = (
    *("stream", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "parallel_tool_calls", "echo"),
)
_BOTH: dict[str, Any] = {
    "model": str,
    **dict.fromkeys(_NUMBERS, float),
    **dict.fromkeys(_WHOLE, Int),
    **dict.fromkeys(_SWITCHES, bool),
    # Its range is wider than a type can express; `for_engine` checks it.
    "seed": int,
    "logprobs": bool | Int,
    "stop": str | Words,
    "stop_token_ids": Ids,
    "allowed_token_ids": Ids,
    "bad_words": Words,
    "logit_bias": dict[str, float],
    "stream_options": AllowedStreamOptions,
    "response_format": AllowedFormat,
    "reasoning_effort": Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    "cache_salt": str,
}
_OF_KIND: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": list[AllowedMessage],
        "tools": list[AllowedTool],
        "tool_choice": Literal["none", "auto", "required"] | AllowedChoice,
        "chat_template_kwargs": TemplateSwitches,
    },
    "completion": {"prompt": str | list[str | Int | Ids], "suffix": str},
}
# No server of the Messages API refuses a field that it does not know, so all others are left out.
_OF_MESSAGES: dict[str, Any] = {
    "model": str,
    "messages": list[AllowedTurn],
    "system": str | list[AllowedBlock],
    "max_tokens": Int,
    "stream": bool,
    "stop_sequences": Words,
    "temperature": float,
    "top_p": float,
    "top_k": Int,
    "tools": list[AllowedMessageTool],
    "tool_choice": AllowedMessageChoice,
    "thinking": AllowedThinking,
    "output_config": AllowedOutput,
    "cache_salt": str,
}
# These change nothing in an answer, and concern only the coordinator.
_LEFT_OUT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "request_id", "session_id"),
        # These add to the answer what a head never adds.
        *("verbose", "timings_per_token", "return_progress", "return_tokens", "return_token_ids"),
        *("return_token_offsets", "return_prompt_text", "return_weight_versions", "return_mm_kwargs"),
    }
)
# Values of theirs that change nothing at a head change the answer of some engines.
_MEANT_ELSEWHERE = frozenset({"lora", "reasoning_format"})
_MIN_SEED, _MAX_SEED = -(1 << 63), (1 << 64) - 1
_AT = re.compile(r" - at `(?:key in )?\$?(.*?)`$")


def for_engine(wanted: ConsumerRequest, *, shares_cache: bool) -> bytes:
    """Return the body for the engine. Raises `RequestError` naming a field that is not passed on.

    A stream always asks for the counts at its end. ``shares_cache``: the engine gets no salt.
    """
    if wanted.kind == "messages":
        return _message_body(wanted, shares_cache=shares_cache)
    known = _BOTH | _OF_KIND[wanted.kind]
    fields: dict[str, Any] = {}
    for name, raw in fields_of(wanted.body).items():
        if name in _LEFT_OUT or bytes(raw) == b"null":
            continue
        if name not in known:
            if _asks_for_nothing(name, raw, wanted.kind):
                continue
            raise RequestError(
                f"{name[:80]!r} is not passed on by a provider",
                param=name[:80],
                code="unsupported_parameter",
                hint="leave it out",
            )
        fields[name] = _read(name, raw, known[name])
    if not _MIN_SEED <= fields.get("seed", 0) <= _MAX_SEED:
        raise RequestError(f"seed: expected {_MIN_SEED} to {_MAX_SEED}", param="seed")
    _check_references([*_schemas_of(fields)])
    if shares_cache:
        fields.pop("cache_salt", None)
    if wanted.stream:
        options = fields.get("stream_options", AllowedStreamOptions())
        fields["stream_options"] = msgspec.structs.replace(options, include_usage=True)
    return msgspec.json.encode(fields)


def _message_body(wanted: ConsumerRequest, *, shares_cache: bool) -> bytes:
    given = fields_of(wanted.body)
    fields = {
        name: _read(name, given[name], kind)
        for name, kind in _OF_MESSAGES.items()
        if name in given and bytes(given[name]) != b"null"
    }
    tools = fields.pop("tools", ())
    own = [tool for tool in tools if tool.type in (None, "custom")]
    if own:
        fields["tools"] = own
    elif tools and "tool_choice" in fields and fields["tool_choice"].type == "any":
        # Every tool was left out, so there is nothing that could be required.
        del fields["tool_choice"]
    output: AllowedOutput = fields.get("output_config", AllowedOutput())
    schemas: list[tuple[str, Any]] = [("tools", tool.input_schema) for tool in own]
    _check_references([*schemas, ("output_config", output.format.schema if output.format else None)])
    if shares_cache:
        fields.pop("cache_salt", None)
    return msgspec.json.encode(fields)


def wants_usage(wanted: ConsumerRequest) -> bool:
    """Return whether a stream's client asked for the event with the counts."""
    raw = fields_of(wanted.body).get("stream_options")
    options = None if raw is None else msgspec.json.decode(raw)
    return bool(isinstance(options, dict) and options.get("include_usage"))


def _asks_for_nothing(name: str, raw: msgspec.Raw, kind: Endpoint) -> bool:
    """Return whether the answer would be the same without the field, as at a head."""
    values = HARMLESS_OF[kind].get(name, HARMLESS.get(name, ()))
    return bool(values) and name not in _MEANT_ELSEWHERE and msgspec.json.decode(raw) in values


def _read(name: str, raw: msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = _AT.search(str(error))
        where = name + (found.group(1).replace("[...]", "[]") if found else "")
        text = str(error)[: found.start()] if found else str(error)
        raise RequestError(
            f"{where}: {text}",
            param=where,
            code="unsupported_parameter",
            hint="a provider passes on text alone" if name == "messages" else None,
        ) from None


def _schemas_of(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for tool in fields.get("tools", ()):
        yield "tools", tool.function.parameters
    if (form := fields.get("response_format")) is not None and form.json_schema is not None:
        yield "response_format", form.json_schema.schema


def _check_references(left: list[tuple[str, Any]]) -> None:
    """Check that no schema refers to anything outside itself, because engines may fetch that.

    ``left`` are the schemas with the field of each. Raises `RequestError`.
    """
    while left:
        name, found = left.pop()
        if isinstance(found, dict):
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                reference = found.get(key)
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise RequestError(f"{name}: a {key} that does not begin with '#'", param=name)
            left += [(name, one) for one in found.values()]
        elif isinstance(found, list):
            left += [(name, one) for one in found]
