"""The bodies that clients send, decoded strictly where a field is known and tolerantly where it is not."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from convoy.errors import RequestError


class StreamOptions(msgspec.Struct, frozen=True):
    """``continuous_usage_stats`` is vLLM's word for usage on every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only ``type: "text"`` is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take. None always means: not given."""

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
    cache_salt: str | None = None  # vLLM's word: prompts share a prefix only where this is the same too


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions. ``prompt`` is text, token ids, or a list of either."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None
    echo: bool | None = None


Body = TypeVar("Body", bound=GenerationBody)

# Fields that would change the answer and are not served, each with the values that ask for nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": ([], ["text"]),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "best_of": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "grammar": (),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "prompt_embeds": (),
}


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """JSON bytes to a body. Raises `RequestError` naming the field, what it was and what was expected."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else _in_words(str(error))[0]
        raise RequestError(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise RequestError("the body is JSON, but not an object", code="invalid_json")
    _refuse_unserved(raw)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message, param = _in_words(str(error))
        code = "missing_required_parameter" if "missing" in message else "invalid_type"
        raise RequestError(f"{param}: {message}" if param else message, param=param, code=code) from None


def _refuse_unserved(raw: dict[str, Any]) -> None:
    for name, harmless in _UNSERVED.items():
        value = raw.get(name)
        if value is None or value in harmless or (name == "best_of" and value == (raw.get("n") or 1)):
            continue
        raise RequestError(
            f"this server does not support {name}" + (f" of {value!r}" if isinstance(value, bool) else ""),
            param=name,
            code="unsupported_parameter",
            hint="leave it out",
        )
    messages = raw.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
            if isinstance(message, dict) and message.get(name):
                param = f"messages[{index}].{name}"
                raise RequestError(
                    f"this server does not support {name} in a message",
                    param=param,
                    code="unsupported_parameter",
                )


_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_PATH = re.compile(r" - at `(?:key in )?\$?\.?(.*?)`$")
_TYPES = re.compile(r"`([^`]+)`")


def _in_words(text: str) -> tuple[str, str | None]:
    """msgspec's error in words, and its field: ('expected an integer, got text', 'max_tokens')."""
    found = _PATH.search(text)
    param = found.group(1).replace("[...]", "") if found else None
    plain = text[: found.start()] if found else text
    missing = re.fullmatch(r"Object missing required field `(.*)`", plain)
    if missing:
        name = missing.group(1)
        return "it is missing", f"{param}.{name}" if param else name

    def words(match: re.Match[str]) -> str:
        kinds = [kind for kind in match.group(1).split(" | ") if kind != "null"] or ["null"]
        return " or ".join(_WORDS.get(kind, kind) for kind in kinds)

    plain = _TYPES.sub(words, plain)
    # "JSON is malformed" keeps its capitals.
    return plain if plain[1:2].isupper() else plain[:1].lower() + plain[1:], param or None
