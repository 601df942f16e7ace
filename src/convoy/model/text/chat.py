"""Encode chat messages through the model's own template, so that no message can forge a turn.

The template sees each message with its control strings enclosed in fence characters that occur in no message.
After rendering, text between fences is encoded as letters and the rest normally. For messages without control
strings, the ids are those of the template rendered and encoded as a whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from convoy.errors import RequestError
from convoy.model.text.control_strings import ControlStrings
from convoy.model.text.token_size import most_message_bytes
from convoy.model.text.vocabulary import Vocabulary, check_bytes, check_length

ROLES = ("system", "developer", "user", "assistant", "tool")

# Unicode's noncharacters: they never stand for text, templates do not write them, and there are 32 of them
_FENCES = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class ChatTemplate:
    """Apply a model's chat template over its vocabulary.

    ``render`` maps messages to text in a sandbox. It raises RequestError if the template refuses them.
    """

    def __init__(self, render: Callable[[list[dict[str, str]]], str], vocabulary: Vocabulary) -> None:
        self._render = render
        self._vocabulary = vocabulary

    def encode(self, messages: object, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a conversation, up to the start of the assistant's turn.

        ``messages`` is a list of objects with ``role`` and ``content`` (text, or a list of text parts).
        Raises RequestError, naming the message and the expected form, for invalid messages. It is also raised
        if the template refuses their order, and for more than ``max_tokens``.
        """
        chat = read_messages(messages)
        if max_tokens is not None:
            max_bytes = most_message_bytes(max_tokens, self._vocabulary.longest_token_bytes)
            check_bytes((message["content"] for message in chat), max_tokens, max_bytes, "messages")
        opening, closing = self._choose_fences(chat)
        # render once with the messages' control strings removed: all control strings left are the template's
        # own
        hollow = self._rendered(chat, lambda role, text: _hollow(opening, text, self._strings(role)))
        trusted = self._count(hollow)
        for at_edges in (False, True):
            fence = partial(self._fence, opening=opening, closing=closing, at_edges=at_edges)
            rendered = self._rendered(chat, fence)
            pieces = _split(rendered, opening, closing)
            # A count above the trusted one means that a message's text became control text after all. It was
            # either joined with its neighbours' text or unfenced by the template. Fences at each message's
            # edges prevent the former.
            if self._count("\0".join(text for text, fenced in pieces if not fenced)) == trusted:
                return self._encode(pieces, max_tokens)
        raise RequestError(
            "a message spells a control token that the chat template does not keep as text", param="messages"
        )

    def _choose_fences(self, chat: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        free = [fence for fence in _FENCES if not any(fence in message["content"] for message in chat)]
        if len(free) < 2:
            raise RequestError(
                "the messages hold every Unicode noncharacter, expected text", param="messages"
            )
        return free[0], free[1]

    def _strings(self, role: str) -> ControlStrings:
        # an assistant message may hold its own markup (<think>, <tool_call>), but never an end of turn
        vocabulary = self._vocabulary
        return vocabulary.special_strings if role == "assistant" else vocabulary.control_strings

    def _fence(self, role: str, text: str, *, opening: str, closing: str, at_edges: bool) -> str:
        fenced = self._strings(role).sub(lambda found: f"{opening}{found}{closing}", text)
        return _around_core(fenced, opening + closing) if at_edges else fenced

    def _rendered(self, chat: Sequence[Mapping[str, str]], change: Callable[[str, str], str]) -> str:
        return self._render(
            [{**message, "content": change(message["role"], message["content"])} for message in chat]
        )

    def _count(self, text: str) -> Counter[str]:
        return Counter(self._vocabulary.control_strings.findall(text))

    def _encode(self, pieces: Sequence[tuple[str, bool]], max_tokens: int | None) -> list[int]:
        self._vocabulary.check_size((text for text, _ in pieces), max_tokens)
        ids: list[int] = []
        for index, (text, fenced) in enumerate(pieces):
            if fenced:
                ids += self._vocabulary.encode_letters(text)
            elif text:
                ids += self._vocabulary.encode_template(text, first=index == 0, max_tokens=max_tokens)
            check_length(len(ids), max_tokens)
        return ids


def read_messages(messages: object) -> list[dict[str, str]]:
    """Check messages and flatten their content to text. Raises RequestError naming the place of a fault."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages is not a list of at least one message", param="messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: object, place: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} is not an object with role and content", param=place)
    role = message.get("role")
    if role not in ROLES:
        shown = repr(role)[:40]
        raise RequestError(
            f"{place}.role is {shown}, expected one of {', '.join(ROLES)}", param=f"{place}.role"
        )
    content = message.get("content")
    # OpenAI's form of a turn that only calls tools has no content
    if content is None and role == "assistant":
        content = ""
    # "developer" is OpenAI's newer name for "system"; templates know only the older one
    return {"role": "system" if role == "developer" else role, "content": _read_content(content, place)}


def _read_content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{place}.content is not text or a list of text parts", param=f"{place}.content")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"{place}.content[{index}] is not a text part, expected {{'type': 'text', 'text': ...}}",
                param=f"{place}.content",
            )
        texts.append(text)
    return "".join(texts)


def _around_core(text: str, fence: str) -> str:
    """Put a fence before and behind ``text``, inside its outer white space, which templates may strip."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{fence}{core}{fence}{text[start + len(core) :]}"


def _hollow(fence: str, text: str, strings: ControlStrings) -> str:
    """Return ``text`` with fences in place of its control strings and at its edges.

    Control strings in the rendered result are then the template's own.
    """
    return _around_core(strings.sub(lambda _: fence, text), fence)


def _split(rendered: str, opening: str, closing: str) -> list[tuple[str, bool]]:
    """Split at fences into (text, whether it lies between a matching pair). A lone fence only splits."""
    fenced = re.compile(f"{opening}([^{opening}{closing}]*){closing}|[{opening}{closing}]")
    pieces: list[tuple[str, bool]] = []
    position = 0
    for match in fenced.finditer(rendered):
        pieces.append((rendered[position : match.start()], False))
        if match[1]:
            pieces.append((match[1], True))
        position = match.end()
    pieces.append((rendered[position:], False))
    return pieces
