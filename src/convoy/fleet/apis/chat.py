"""Carry OpenAI's chat and completions: their fields for an engine, their chunks, and what a relay adds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from convoy.api.body.fields import HARMLESS, HARMLESS_OF, Endpoint
from convoy.api.openai.answers import ChatChunk, ChunkChoice, Delta, TextChoice, TextCompletion
from convoy.api.problem import ErrorBody, body_for
from convoy.config.type_resolution import resolved
from convoy.errors import RequestError
from convoy.fleet.apis.api import EventFacts, Fields
from convoy.fleet.apis.fields import Ids, Int, Short, Strict, Words, check_references, read_field


class CacheControl(msgspec.Struct, frozen=True):
    """Accept a mark of Anthropic's for prefixes to keep, as a head does. Nothing of it is passed on."""


class TextPart(Strict, frozen=True):
    """Hold a part of a message. Other types name addresses that an engine would fetch."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


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
    reasoning_content: str | None = None
    reasoning: str | None = None


class AllowedFunction(Strict, frozen=True):
    name: Short
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold a tool. Only functions are passed on: an engine may run the others."""

    type: Short
    function: AllowedFunction | None = None


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
    schema: dict[str, Any] | None = None


class AllowedOutputs(Strict, frozen=True):
    """Hold vLLM's ``structured_outputs``."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Words | None = None
    grammar: str | None = None
    json_object: bool | None = None


class AllowedStreamOptions(Strict, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class TemplateSwitches(Strict, frozen=True):
    """Hold the variables of a chat template that switch thinking, and no others."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


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
_SCHEMAS = ("guided_json", "json_schema")
_BOTH: Mapping[str, Any] = {
    "model": str,
    **dict.fromkeys(_NUMBERS, float),
    **dict.fromkeys(_WHOLE, Int),
    **dict.fromkeys(_SWITCHES, bool),
    # Its range is wider than a type can express; `_rebuild` checks it.
    "seed": int,
    "logprobs": bool | Int,
    "stop": str | Words,
    "stop_token_ids": Ids,
    "allowed_token_ids": Ids,
    "bad_words": Words,
    "logit_bias": dict[str, float],
    "stream_options": AllowedStreamOptions,
    "response_format": AllowedFormat,
    "structured_outputs": AllowedOutputs,
    **dict.fromkeys(("guided_regex", "guided_grammar", "grammar"), str),
    "guided_choice": Words,
    **dict.fromkeys(_SCHEMAS, dict[str, Any] | bool | str),
    "reasoning_effort": Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    "cache_salt": str,
}
_OF: Mapping[Endpoint, Mapping[str, Any]] = {
    "chat": {
        "messages": list[AllowedMessage],
        "tools": list[AllowedTool],
        "tool_choice": Literal["none", "auto", "required"] | AllowedChoice,
        "chat_template_kwargs": TemplateSwitches,
        "continue_final_message": bool,
        "add_generation_prompt": bool,
    },
    "completion": {"prompt": str | list[str | Int | Ids], "suffix": str},
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
_LAST_EVENT = b"data: [DONE]"
_MIN_SEED, _MAX_SEED = -(1 << 63), (1 << 64) - 1


def rebuild_chat(given: Fields, stream: bool) -> dict[str, Any]:
    """Return the fields of a chat for an engine. Raises `RequestError` naming one that is not passed on."""
    fields = _rebuild(given, "chat", stream=stream)
    if "messages" in fields:
        fields["messages"] = [_without_marks(message) for message in fields["messages"]]
    tools: list[AllowedTool] = fields.pop("tools", [])
    own = [tool for tool in tools if tool.type == "function"]
    if own:
        fields["tools"] = own
    elif tools and fields.get("tool_choice") == "required":
        # Every tool was left out, so there is nothing that could be required.
        del fields["tool_choice"]
    check_references(("tools", tool.function.parameters) for tool in own if tool.function)
    return fields


def _without_marks(message: AllowedMessage) -> AllowedMessage:
    if not isinstance(message.content, list):
        return message
    parts = [TextPart(part.type, part.text) for part in message.content]
    return msgspec.structs.replace(message, content=parts)


def rebuild_completion(given: Fields, stream: bool) -> dict[str, Any]:
    """Return the fields of a completion for an engine. Raises `RequestError` as `rebuild_chat` does."""
    return _rebuild(given, "completion", stream=stream)


def _rebuild(given: Fields, endpoint: Endpoint, *, stream: bool) -> dict[str, Any]:
    known = {**_BOTH, **_OF[endpoint]}
    fields: dict[str, Any] = {}
    for name, raw in given.items():
        if name in _LEFT_OUT or bytes(raw) == b"null":
            continue
        if name in known:
            fields[name] = read_field(name, raw, known[name])
        elif not _asks_for_nothing(name, raw, endpoint):
            raise RequestError(
                f"{name[:80]!r} is not passed on by a provider",
                param=name[:80],
                code="unsupported_parameter",
                hint="leave it out",
            )
    if not _MIN_SEED <= fields.get("seed", 0) <= _MAX_SEED:
        raise RequestError(f"seed: expected {_MIN_SEED} to {_MAX_SEED}", param="seed")
    check_references(_schemas_of(fields))
    if stream:
        # The counts at the end are paid for, whether or not the client wants them.
        options = fields.get("stream_options", AllowedStreamOptions())
        fields["stream_options"] = msgspec.structs.replace(options, include_usage=True)
    return fields


def _asks_for_nothing(name: str, raw: msgspec.Raw, endpoint: Endpoint) -> bool:
    """Return whether the answer would be the same without the field, as at a head."""
    values = HARMLESS_OF[endpoint].get(name, HARMLESS.get(name, ()))
    return bool(values) and name not in _MEANT_ELSEWHERE and msgspec.json.decode(raw) in values


def _schemas_of(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    given = [(name, fields.get(name)) for name in _SCHEMAS]
    if (form := fields.get("response_format")) is not None:
        given += [("response_format", form.schema)]
        given += [("response_format", form.json_schema.schema)] if form.json_schema else []
    if (outputs := fields.get("structured_outputs")) is not None:
        given.append(("structured_outputs", outputs.json))
    for name, schema in given:
        yield name, _decoded(schema) if isinstance(schema, str) else schema


def _decoded(schema: str) -> object:
    """Return a schema that came as its JSON text. An engine refuses other text by itself."""
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):
        return None


def read_chunk(found: Mapping[str, Any]) -> EventFacts:
    """Read a chunk or a whole answer, of a chat or a completion."""
    given, usage = found.get("choices"), found.get("usage")
    choices = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return EventFacts(
        tokens=sum(map(_says_something, choices)),
        usage=usage,
        texts=[one.get(name) for one in choices for name in ("delta", "message", "text")],
        only_usage=not given and bool(usage),
        silent=bool(choices) and all(map(_is_silent, choices)),
        error=found.get("error"),
    )


def _says_something(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    # Tool calls, refusals and reasoning under any name are all tokens.
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))


def _is_silent(choice: Mapping[str, Any]) -> bool:
    empty = choice.get("delta") == {} or choice.get("text") == ""
    # A token may have a log-probability before its bytes make a character.
    return empty and choice.get("finish_reason") is None and choice.get("logprobs") is None


class ChunkForm:
    """Implement `EventForm` for chats and completions."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._model = model
        self._chat = chat
        # The engine's id, once its first chunk is here.
        self._id = ""

    def pass_on(self, event: bytes) -> bytes:
        self._id = self._id or _id_of(event)
        return event + b"\n\n"

    def is_last(self, event: bytes) -> bool:
        return event.strip() == _LAST_EVENT

    def keep_alive(self) -> bytes:
        """Return a chunk without text. Before the engine's first chunk its id is not known, and empty."""
        created_s = int(time.time())
        if self._chat:
            turn = ChunkChoice(0, Delta())
            return _data(ChatChunk(id=self._id, created=created_s, model=self._model, choices=[turn]))
        text = TextChoice(0, "")
        return _data(TextCompletion(id=self._id, created=created_s, model=self._model, choices=[text]))

    def failure(self, error: BaseException) -> Sequence[msgspec.Struct]:
        return [body_for(error)]

    def refused(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 - a stream has one form of errors
        try:
            return _data(msgspec.json.decode(body, type=resolved(ErrorBody)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _data({"error": {"message": "the engine refused the request", "type": "server_error"}})

    def streams(self, status: int, body: bytes) -> bool:  # noqa: ARG002 - a refusal keeps its status
        return False


def _data(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _id_of(event: bytes) -> str:
    try:
        found = msgspec.json.decode(event.removeprefix(b"data:"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    found_id = found.get("id") if isinstance(found, dict) else None
    return found_id if isinstance(found_id, str) else ""
