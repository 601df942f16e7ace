"""Translate Ollama's bodies into OpenAI's form of a chat, so that one reader checks both."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.listen.options import ServeOptions
from convoy.api.ollama.problem import OPTIONS
from convoy.api.openai.bodies import ChatBody, convert_object, decode_object
from convoy.api.openai.parsed_request import keep_alive_s, read_chat
from convoy.api.refusals import Forbidden
from convoy.api.service import Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.errors import RequestError

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
    keep_alive: float | str | None = None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """Hold the body of POST /api/chat."""

    messages: list[OllamaMessage] = []
    tools: list[dict[str, Any]] | None = None


class OllamaPromptBody(OllamaBody, frozen=True, kw_only=True):
    """Hold the body of POST /api/generate."""

    prompt: str = ""
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

    Without a prompt or messages there is none to run, and the model is only loaded. Raises `RequestError` or
    `UnknownModel`.
    """
    if not (body.prompt if isinstance(body, OllamaPromptBody) else body.messages):
        return _read_wish(body, service, options)
    chat: dict[str, Any] = {
        "model": served_name(body.model, service),
        "stream": body.stream is not False,
        "keep_alive": body.keep_alive,
        **_read_options(body.options or {}),
        **_form(body.format),
        **_thinking(body.think),
    }
    if isinstance(body, OllamaPromptBody):
        system = [{"role": "system", "content": body.system}] if body.system else []
        chat["messages"] = [*system, {"role": "user", "content": body.prompt}]
    else:
        chat["messages"] = _messages(body.messages, options.max_messages)
        chat["tools"] = body.tools
    return read_chat(convert_object(chat, ChatBody), service, options, salt, dropped=dropped)


def _read_wish(body: OllamaBody, service: Service, options: ServeOptions) -> ParsedRequest:
    """Return a request that loads its model, or with `keep_alive` 0 unloads it, and runs nothing."""
    model, kept_s = service.model(served_name(body.model, service)), keep_alive_s(body.keep_alive)
    if kept_s == 0 and options.keys is not None:
        raise Forbidden("an api key unloads no model", hint="`convoy open` signs in to operate")
    if kept_s == 0 and (service.switch is None or not service.switch.takes_wishes):
        raise RequestError(
            "this head keeps its model loaded",
            param="keep_alive",
            hint="start it with --keep-alive or --also to unload models",
        )
    return ParsedRequest(
        *(model, (), 0, body.stream is not False),
        include_usage=False,
        continuous_usage=False,
        keep_alive_s=kept_s,
    )


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
    found = {name: given[name] for name in OPTIONS if given.get(name) is not None}
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


def _messages(given: Sequence[OllamaMessage], max_messages: int) -> list[dict[str, Any]]:
    """Return the messages in OpenAI's form. A result belongs to the first open call of its tool."""
    if len(given) > max_messages:
        raise RequestError(
            f"messages has {len(given)} messages, and the limit is {max_messages}", param="messages"
        )
    found: list[dict[str, Any]] = []
    waiting = _OpenCalls()
    for index, message in enumerate(given):
        _refuse(f"messages[{index}].images", message.images, ([],))
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            call_id = waiting.take(message.tool_name)
            if call_id is None:
                where = f"messages[{index}]"
                raise RequestError(f"{where} is a result of a call that no message made", param=where)
            turn["tool_call_id"] = call_id
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        for called in message.tool_calls or ():
            name = called.function.name
            arguments = msgspec.json.encode(called.function.arguments).decode()
            function = {"name": name, "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": waiting.add(name), "function": function})
        found.append(turn)
    return found


class _OpenCalls:
    """Number the calls of a conversation, and find those without a result in constant time."""

    def __init__(self) -> None:
        self._is_open: list[bool] = []
        # The numbers of all calls and of those of each tool. A number whose call has its result is skipped.
        self._all: deque[int] = deque()
        self._of_tool: defaultdict[str, deque[int]] = defaultdict(deque)

    def add(self, tool: str) -> str:
        """Return the id of a new call of ``tool``."""
        number = len(self._is_open)
        self._is_open.append(True)
        self._all.append(number)
        self._of_tool[tool].append(number)
        return f"call_{number}"

    def take(self, tool: str | None) -> str | None:
        """Return the id of the first open call of ``tool``, or of any tool if it has no name, and close it.

        Returns None if there is no such call.
        """
        numbers = self._of_tool.get(tool, deque()) if tool else self._all
        while numbers:
            number = numbers.popleft()
            if self._is_open[number]:
                self._is_open[number] = False
                return f"call_{number}"
        return None
