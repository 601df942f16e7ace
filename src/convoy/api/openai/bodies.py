"""Define and decode request bodies: known fields strictly, unknown fields tolerantly."""

from __future__ import annotations

import codecs
from typing import Any, TypeVar

import msgspec

from convoy.api.body.body_shape import check_shape
from convoy.api.body.fields import Endpoint, refuse_unserved
from convoy.api.openai.answer_form import FormFields
from convoy.config.type_resolution import resolved
from convoy.config.type_words import in_words
from convoy.errors import RequestError


class StreamOptions(msgspec.Struct, frozen=True):
    """Hold a stream's options.

    ``continuous_usage_stats`` is vLLM's word for usage on every chunk. ``include_progress`` asks a chat for
    events while its prompt runs.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_progress: bool = False


class ContentPart(msgspec.Struct, frozen=True):
    """Hold a part of a message. Only ``type: "text"`` is served."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """Hold the function of a call. ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, frozen=True):
    """Hold a call in an assistant's turn."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """Hold one turn of a conversation. ``reasoning`` is the newer name of ``reasoning_content``."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    """Hold the function of a tool. ``parameters`` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, frozen=True):
    """Hold a tool. Only ``type: "function"`` is served, and others are left out."""

    type: str
    function: ToolFunction | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """Name the function that must be called."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """Hold a tool choice that names a function."""

    function: NamedFunction
    type: str = "function"


class GenerationBody(FormFields, frozen=True, kw_only=True):
    """Hold the fields of both endpoints. None always means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    # vLLM's name. Two prompts share a cached prefix only if their salts are equal too.
    cache_salt: str | None = None
    # Ollama's name: how long the model stays loaded after the answer.
    keep_alive: float | str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """Hold the body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # vLLM's names, which llama.cpp knows too.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """Hold the body of POST /v1/completions. ``prompt`` is text, token ids, or a list of either."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None
    echo: bool | None = None


# The most bits of a whole number in a body.
_MAX_BITS = 64

Body = TypeVar("Body", bound=GenerationBody)
AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """Return the body that JSON bytes hold. Raises `RequestError` as `decode_object` and `convert_object` do.

    A field that would change the answer and is not served is refused.
    """
    raw = decode_object(data)
    endpoint: Endpoint = "chat" if issubclass(kind, ChatBody) else "completion"
    refuse_unserved(raw, frozenset(kind.__struct_fields__), endpoint)
    return convert_object(raw, kind)


def decode_object(data: bytes) -> dict[str, Any]:
    """Return the object that JSON bytes hold, with or without a byte order mark. Raises `RequestError`."""
    check_shape(data)
    try:
        raw = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = _reason(error, data)
        raise RequestError(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise RequestError("the body is JSON, but not an object", code="invalid_json")
    _check_sizes(raw)
    return raw


def convert_object(raw: dict[str, Any], kind: type[AnyBody]) -> AnyBody:
    """Return an object as a body of type ``kind``; fields that it does not name are ignored.

    Raises `RequestError`, naming the field, its value or type, and the expected one.
    """
    try:
        return msgspec.convert(raw, resolved(kind))
    except msgspec.ValidationError as error:
        message, param = in_words(str(error), _WORDS)
        code = "missing_required_parameter" if "missing" in message else "invalid_type"
        raise RequestError(f"{param}: {message}" if param else message, param=param, code=code) from None


def _check_sizes(raw: dict[str, Any]) -> None:
    # Do not repeat a number of thousands of digits in an error. Python even refuses to write some of them.
    for name, value in raw.items():
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            text = f"{name[:40]} is a number of {value.bit_length()} bits, and the limit is {_MAX_BITS}"
            raise RequestError(text, param=name[:40], code="invalid_type")


def _reason(error: Exception, data: bytes) -> str:
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            # The decoder counts from the string's own start, and does not tell its field.
            try:
                data.decode("utf-8")
            except UnicodeDecodeError as found:
                return f"the body is not UTF-8 (byte {found.start})"
            return "the body is not UTF-8"
        case _:
            return in_words(str(error), _WORDS)[0]


_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
