"""One conversation in the bodies of all three APIs, translated as a server does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from convoy.api.anthropic.answer import MessageAnswer
from convoy.api.anthropic.bodies import decode_messages
from convoy.api.anthropic.translate import read_messages
from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.usage import ResponseBuilder
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.bodies import ChatBody, decode_body
from convoy.api.openai.chat_answer import ChatAnswer
from convoy.api.openai.parsed_request import read_chat
from convoy.api.responses.answer import ResponsesAnswer
from convoy.api.responses.bodies import decode_responses
from convoy.api.responses.translate import ResponsesRequest, read_response
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.model.text.conversation import Tool
from convoy.model.text.tokens import Tokenizer
from support.fake_service import FakeEngine

APIS = ("chat", "messages", "responses")
OPTIONS = ServeOptions()


def service_of(tokenizer: Tokenizer, room: int = 8192) -> Service:
    """Return the service of a model with an engine that is never asked."""
    engine = FakeEngine()
    engine.room = room
    return Service((ServedModel("fake", engine, tokenizer),), lambda: (True, ""), dict)


def translated(api: str, body: Mapping[str, Any], service: Service) -> ParsedRequest:
    """Return the engine's request for a body. Raises ConvoyError."""
    data, dropped = msgspec.json.encode(body), DroppedHistory()
    if api == "chat":
        return read_chat(decode_body(data, ChatBody), service, OPTIONS, b"", dropped=dropped)
    if api == "messages":
        return read_messages(decode_messages(data), service, OPTIONS, b"", dropped=dropped)
    return read_response(decode_responses(data), service, OPTIONS, b"", store=None, dropped=dropped)


def builder(api: str, asked: ParsedRequest) -> ResponseBuilder:
    """Return the builder of the answer."""
    if api == "chat":
        return ChatAnswer(asked)
    if api == "messages":
        return MessageAnswer(asked, secret=b"secret")
    assert isinstance(asked, ResponsesRequest)
    return ResponsesAnswer(asked)


def calls_in(api: str, answer: ResponseBuilder) -> list[tuple[str, Any]]:
    """Return the name and the arguments of each call in a whole answer."""
    body = json.loads(msgspec.json.encode(answer.whole()))
    if api == "chat":
        calls = [one["function"] for one in body["choices"][0]["message"].get("tool_calls") or ()]
        return [(one["name"], json.loads(one["arguments"])) for one in calls]
    if api == "messages":
        return [(one["name"], one["input"]) for one in body["content"] if one["type"] == "tool_use"]
    items = [one for one in body["output"] if one["type"] == "function_call"]
    return [(one["name"], json.loads(one["arguments"])) for one in items]


def forcing(api: str, tools: tuple[Tool, ...], name: str | None) -> dict[str, Any]:
    """Return a body that demands a call of any tool, or of the named one."""
    functions = [
        {"name": one.name, "description": one.description, "parameters": one.parameters, "strict": one.strict}
        for one in tools
    ]
    if api == "chat":
        return {
            "messages": [{"role": "user", "content": "Go."}],
            "tools": [{"type": "function", "function": one} for one in functions],
            "tool_choice": {"type": "function", "function": {"name": name}} if name else "required",
        }
    if api == "messages":
        return {
            "model": "fake",
            "max_tokens": 2000,
            "messages": [{"role": "user", "content": "Go."}],
            "tools": [
                {"name": one["name"], "input_schema": one["parameters"], "strict": one["strict"]}
                for one in functions
            ],
            "tool_choice": {"type": "tool", "name": name} if name else {"type": "any"},
        }
    return {
        "input": "Go.",
        "tools": [{"type": "function", **one} for one in functions],
        "tool_choice": {"type": "function", "name": name} if name else "required",
    }


def talking(api: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return a body in which every text is given by its field; see `FIELDS`."""
    schema = {
        "type": "object",
        "properties": {
            texts["parameter"]: {"type": "string", "description": texts["parameter_description"]},
            "mode": {"type": "string", "enum": [texts["choice"], "slow"]},
        },
        "required": [texts["parameter"]],
    }
    arguments = {texts["key"]: texts["value"], "more": [{"inner": texts["inner"]}]}
    return _TALKING[api](texts, schema, arguments)


def _chat(texts: Mapping[str, str], schema: Any, arguments: Any) -> dict[str, Any]:
    function = {"name": texts["called"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": texts["call_id"], "type": "function", "function": function}
    tool = {"name": texts["tool"], "description": texts["description"], "parameters": schema}
    return {
        "messages": [
            {"role": "system", "content": texts["system"]},
            {"role": "user", "content": texts["user"], "name": texts["participant"]},
            {"role": "assistant", "content": texts["answer"]},
            {"role": "user", "content": "Go on."},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": texts["reasoning"],
                "tool_calls": [call],
            },
            {"role": "tool", "content": texts["result"], "tool_call_id": texts["call_id"]},
        ],
        "tools": [{"type": "function", "function": tool}],
        "chat_template_kwargs": {"extra": texts["variable"]},
    }


def _messages(texts: Mapping[str, str], schema: Any, arguments: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "max_tokens": 10,
        "system": [{"type": "text", "text": texts["system"]}],
        "messages": [
            {"role": "user", "content": texts["user"]},
            {"role": "assistant", "content": texts["answer"]},
            {"role": "user", "content": "Go on."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": texts["reasoning"], "signature": "x"},
                    {
                        "type": "tool_use",
                        "id": texts["call_id"],
                        "name": texts["called"],
                        "input": arguments,
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": texts["call_id"], "content": texts["result"]}
                ],
            },
        ],
        "tools": [{"name": texts["tool"], "description": texts["description"], "input_schema": schema}],
    }


def _responses(texts: Mapping[str, str], schema: Any, arguments: Any) -> dict[str, Any]:
    return {
        "instructions": texts["system"],
        "input": [
            {"role": "user", "content": texts["user"]},
            {"role": "assistant", "content": texts["answer"]},
            {"role": "user", "content": "Go on."},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": texts["reasoning"]}],
            },
            {
                "type": "function_call",
                "call_id": texts["call_id"],
                "name": texts["called"],
                "arguments": json.dumps(arguments, ensure_ascii=False),
            },
            {"type": "function_call_output", "call_id": texts["call_id"], "output": texts["result"]},
        ],
        "tools": [
            {
                "type": "function",
                "name": texts["tool"],
                "description": texts["description"],
                "parameters": schema,
            }
        ],
    }


_TALKING: dict[str, Callable[[Mapping[str, str], Any, Any], dict[str, Any]]] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
}
HONEST = {
    "system": "Be brief.",
    "user": "Read it.",
    "participant": "Ann",
    "answer": "Sure.",
    "reasoning": "I need it.",
    "call_id": "abcdefghi",
    "called": "read",
    "key": "path",
    "value": "notes.txt",
    "inner": "line",
    "result": "The text.",
    "tool": "read",
    "description": "Read a file.",
    "parameter": "path",
    "parameter_description": "Where it is.",
    "choice": "fast",
    "variable": "More.",
}
# Only chat completions have the name of a participant, and variables of the template.
FIELDS = {
    api: tuple(name for name in HONEST if api == "chat" or name not in {"participant", "variable"})
    for api in APIS
}
