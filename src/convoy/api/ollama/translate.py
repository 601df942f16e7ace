"""Translate Ollama's bodies into OpenAI's form of a chat, so that one reader checks both."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.bodies import ChatBody, convert_object, decode_object
from convoy.api.openai.parsed_request import read_chat
from convoy.api.service import Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.errors import RequestError

# The names of options that mean the same here.
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
# Options that would change the answer and are not served, with the values that ask for nothing. All others
# say how a model is loaded, or belong to one of these.
_REFUSED_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "repeat_penalty": (1, 0),
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
}
# The same for the fields of a body.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "raw": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
}
# Values of num_predict for an answer without a limit of its own.
_NO_LIMIT = (-1, -2)
_LATEST = ":latest"


class OllamaCall(msgspec.Struct, frozen=True):
    """Hold the function of a call. Its arguments are an object, and it has no id."""

    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, frozen=True):
    """Hold a call in an assistant's message."""

    function: OllamaCall


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a message. A tool's result may name its tool."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    images: list[str] | None = None


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the fields of both endpoints. An answer is streamed unless ``stream`` is false."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    options: dict[str, Any] | None = None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """Hold the body of POST /api/chat."""

    messages: list[OllamaMessage]
    tools: list[dict[str, Any]] | None = None


class OllamaPromptBody(OllamaBody, frozen=True, kw_only=True):
    """Hold the body of POST /api/generate."""

    prompt: str
    system: str | None = None


def decode_chat(data: bytes) -> OllamaChatBody:
    """Return the body of POST /api/chat. Raises `RequestError`."""
    return convert_object(_served(decode_object(data)), OllamaChatBody)


def decode_prompt(data: bytes) -> OllamaPromptBody:
    """Return the body of POST /api/generate. Raises `RequestError`."""
    return convert_object(_served(decode_object(data)), OllamaPromptBody)


def read_ollama(
    body: OllamaChatBody | OllamaPromptBody,
    service: Service,
    options: ServeOptions,
    salt: bytes,
    *,
    dropped: DroppedHistory,
) -> ParsedRequest:
    """Return the engine's request. ``salt`` is that of the caller's key; ``dropped`` counts left-out calls.

    Raises `RequestError` or `UnknownModel`.
    """
    chat: dict[str, Any] = {
        "model": served_name(body.model, service),
        "stream": body.stream is not False,
        **_read_options(body.options or {}),
        **_form(body.format),
        **_thinking(body.think),
    }
    if isinstance(body, OllamaPromptBody):
        system = [{"role": "system", "content": body.system}] if body.system else []
        chat["messages"] = [*system, {"role": "user", "content": body.prompt}]
    else:
        chat["messages"] = _messages(body.messages)
        chat["tools"] = body.tools
    return read_chat(convert_object(chat, ChatBody), service, options, salt, dropped=dropped)


def served_name(given: str, service: Service) -> str:
    """Return the name of a model here. Ollama's clients may add the tag ":latest" to it."""
    names = {model.name for model in service.models}
    return given if given in names else given.removesuffix(_LATEST)


def _served(raw: dict[str, Any]) -> dict[str, Any]:
    for name, harmless in _REFUSED.items():
        _refuse(name, raw.get(name), harmless)
    return raw


def _refuse(name: str, value: object, harmless: Sequence[object]) -> None:
    if value is not None and value not in harmless:
        raise RequestError(
            f"this server does not support {name}",
            param=name,
            code="unsupported_parameter",
            hint="leave it out",
        )


def _read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    for name, harmless in _REFUSED_OPTIONS.items():
        _refuse(f"options.{name}", given.get(name), harmless)
    found = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
    limit = given.get("num_predict")
    if limit is not None and limit not in _NO_LIMIT:
        found["max_tokens"] = limit
    return found


def _form(given: str | dict[str, Any] | None) -> dict[str, Any]:
    if not given:
        return {}
    if isinstance(given, dict):
        schema = {"name": "answer", "schema": given}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if given != "json":
        raise RequestError(f'format is {given[:40]!r}, expected "json" or a schema', param="format")
    return {"response_format": {"type": "json_object"}}


def _thinking(given: bool | str | None) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, bool):
        return {"chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), given)}
    return {"reasoning_effort": given}


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages in OpenAI's form. A result belongs to the first open call of its tool."""
    found: list[dict[str, Any]] = []
    # The id and the name of each call without a result.
    waiting: deque[tuple[str, str]] = deque()
    num_calls = 0
    for index, message in enumerate(given):
        _refuse(f"messages[{index}].images", message.images, ([],))
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            call = next((one for one in waiting if message.tool_name in (None, "", one[1])), None)
            if call is None:
                where = f"messages[{index}]"
                raise RequestError(f"{where} is a result of a call that no message made", param=where)
            waiting.remove(call)
            turn["tool_call_id"] = call[0]
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        for called in message.tool_calls or ():
            number, num_calls = f"call_{num_calls}", num_calls + 1
            waiting.append((number, called.function.name))
            arguments = msgspec.json.encode(called.function.arguments).decode()
            function = {"name": called.function.name, "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": number, "function": function})
        found.append(turn)
    return found
