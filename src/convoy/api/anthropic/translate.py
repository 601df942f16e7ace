"""Translate the body of a Messages request into an engine request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from convoy.api.anthropic.bodies import AnswerFormat, MessagesBody, PromptBody, decode_prompt
from convoy.api.anthropic.history import read_history
from convoy.api.anthropic.shapes import TokenCount
from convoy.api.anthropic.tools import read_tools
from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.request import ChatRequest, cache_salt_of, count_prompt, parse_chat
from convoy.api.keys.repeats import CONTEXT_ERROR
from convoy.api.listen.options import ServeOptions
from convoy.api.service import Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.errors import RequestError
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.conversation import Conversation
from convoy.model.text.grammar import Grammar

# Templates put the effort into the prompt, so no other text may pass.
EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
_MAX_STOPS = 16


def read_messages(
    body: MessagesBody, service: Service, options: ServeOptions, salt: bytes, *, dropped: DroppedHistory
) -> ParsedRequest:
    """Return the engine's request. ``salt`` is that of the caller's key; ``dropped`` counts left-out blocks.

    A ``max_tokens`` beyond the room that the prompt leaves is cut to that room, and the request is marked as
    open-ended: its answer may end because the context is full. Raises `RequestError` or `UnknownModel`.
    """
    if body.max_tokens < 1:
        raise RequestError(f"max_tokens: {body.max_tokens} is less than 1", param="max_tokens")
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(body, name)) is not None
    }
    request = ChatRequest(
        model=body.model,
        conversation=_conversation(body, options, dropped),
        params=SamplingParams(**given, seed=secrets.randbits(63)),
        stop=_stops(body.stop_sequences or ()),
        stream=body.stream is True,
        grammar=_grammar(body.output_config.format if body.output_config else None),
        caller=salt,
    )
    try:
        asked = parse_chat(request, service, cache_salt_of(salt, body.cache_salt))
    except RequestError as error:
        if error.code != CONTEXT_ERROR:
            raise
        raise _too_long(request, body.max_tokens, service) from None
    (first,) = asked.requests
    if body.max_tokens > first.max_tokens:
        return asked
    return replace(asked, requests=(replace(first, max_tokens=body.max_tokens, open_ended=False),))


def count_tokens(
    data: bytes, service: Service, options: ServeOptions, *, dropped: DroppedHistory
) -> TokenCount:
    """Return the number of a prompt's tokens, also beyond the context. Raises `RequestError`."""
    body = decode_prompt(data)
    conversation = _conversation(body, options, dropped)
    return TokenCount(count_prompt(ChatRequest(body.model, conversation, SamplingParams()), service))


def _conversation(body: PromptBody, options: ServeOptions, dropped: DroppedHistory) -> Conversation:
    history = read_history(body.system, body.messages, max_parts=options.max_messages)
    dropped.count("messages", history.dropped)
    tools, choice = read_tools(body.tools, body.tool_choice)
    turns = tuple(history.turns)
    # Anthropic's way to give the beginning of an answer.
    continues = turns[-1].role == "assistant"
    return Conversation(turns, tools, choice, _variables(body), continues=continues)


def _variables(body: PromptBody) -> dict[str, Any]:
    """Return the variables by which templates switch thinking. An unknown value sets none."""
    variables: dict[str, Any] = {}
    kind = body.thinking.type if body.thinking else None
    if kind in ("enabled", "adaptive", "disabled"):
        variables = dict.fromkeys(("enable_thinking", "thinking"), kind != "disabled")
    effort = body.output_config.effort if body.output_config else None
    if effort in EFFORTS:
        variables["reasoning_effort"] = effort
    return variables


def _stops(given: Sequence[str]) -> tuple[str, ...]:
    if len(given) > _MAX_STOPS:
        raise RequestError(
            f"stop_sequences: {len(given)} texts, and the limit is {_MAX_STOPS}", param="stop_sequences"
        )
    if "" in given:
        raise RequestError("stop_sequences: a text is empty", param="stop_sequences")
    return tuple(given)


def _grammar(given: AnswerFormat | None) -> Grammar | None:
    if given is None:
        return None
    where = "output_config.format"
    if given.type != "json_schema":
        raise RequestError(f"{where}.type: expected json_schema", param=f"{where}.type")
    if given.schema is None:
        raise RequestError(f"{where}.schema: field required", param=f"{where}.schema")
    return Grammar("json_schema", msgspec.json.encode(given.schema).decode(), param=f"{where}.schema")


def _too_long(request: ChatRequest, max_tokens: int, service: Service) -> RequestError:
    """Return the error in the words that clients look for: by them they shorten the conversation."""
    num_prompt, room = count_prompt(request, service), service.model(request.model).max_context
    text = f"prompt is too long: {num_prompt} tokens > {room} maximum"
    if num_prompt <= room:
        # The prompt fits alone, but leaves no token for an answer.
        text = f"input length and `max_tokens` exceed context limit: {num_prompt} + {max_tokens} > {room}"
    return RequestError(text, param="messages", code=CONTEXT_ERROR)
