"""Encode a conversation through the model's own template, so that no text of the caller can forge a turn.

The template sees each of the caller's texts with its control strings enclosed in fence characters that occur
in no text. After rendering, text between fences is encoded as letters and the rest normally. For texts
without control strings, the ids are those of the template rendered and encoded as a whole.

The caller's texts are the contents, reasoning, names and arguments of the turns, everything that describes a
tool, and the values of the template's variables.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from convoy.errors import RequestError
from convoy.model.text.control_strings import ControlStrings
from convoy.model.text.conversation import Conversation, Role, Tool, ToolCall, Turn
from convoy.model.text.token_size import most_message_bytes
from convoy.model.text.vocabulary import Vocabulary, check_bytes, check_length

ROLES = ("system", "developer", "user", "assistant", "tool")

# Unicode's noncharacters: they never stand for text, templates do not write them, and there are 32 of them
_FENCES = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_NUM_FENCES = 3
# Words of JSON schemas, which templates compare. Alone they are no control string of any model.
_SCHEMA_WORDS = frozenset(
    (
        *("string", "number", "integer", "boolean", "array", "object", "null", "type", "properties", "items"),
        *("required", "enum", "description", "default", "title", "format", "anyOf", "oneOf", "allOf"),
    )
)
# Variables that only this module may set.
RESERVED_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))

_Change = Callable[[str], str]


class ChatTemplate:
    """Apply a model's chat template over its vocabulary.

    ``render`` maps the template's variables to text in a sandbox. It raises RequestError if the template
    refuses them. ``own_variables`` are those that no caller may set. ``has_tools`` tells whether the template
    writes tools. With ``arguments_as_text`` the template
    joins the arguments of a call as text, otherwise they are an object. ``call_id_chars`` is the length that
    the template demands of call ids, if it does.
    """

    def __init__(
        self,
        render: Callable[[Mapping[str, Any]], str],
        vocabulary: Vocabulary,
        *,
        own_variables: frozenset[str] = frozenset(),
        has_tools: bool = True,
        arguments_as_text: bool = False,
        call_id_chars: int | None = None,
    ) -> None:
        self._render = render
        self._vocabulary = vocabulary
        self._own_variables = own_variables | RESERVED_VARIABLES
        self._has_tools = has_tools
        self._arguments_as_text = arguments_as_text
        self._call_id_chars = call_id_chars

    def encode(self, chat: Conversation | object, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a conversation, up to the start of the assistant's turn.

        ``chat`` is a `Conversation`, or a list of objects with ``role`` and ``content`` (text, or a list of
        text parts). Raises RequestError, naming the message and the expected form, for invalid messages. It
        is also raised if the template refuses their order, and for more than ``max_tokens``.
        """
        conversation = chat if isinstance(chat, Conversation) else Conversation(read_messages(chat))
        self._check(conversation)
        variables = self._variables(conversation)
        texts = list(_texts(list(variables.values())))
        if max_tokens is not None:
            max_bytes = most_message_bytes(max_tokens, self._vocabulary.longest_token_bytes)
            check_bytes(texts, max_tokens, max_bytes, "messages")
        opening, closing, cut = _choose_fences(texts)
        if conversation.continues:
            _mark_end(variables["messages"], cut)
        render = partial(self._rendered, variables, cut if conversation.continues else "")
        # Render once with the control strings of the caller's texts removed: all control strings left are the
        # template's own.
        trusted = self._count(render(partial(_hollow, opening, self._controls)))
        for at_edges in (False, True):
            rendered = render(partial(self._fence, opening=opening, closing=closing, at_edges=at_edges))
            pieces = _split(rendered, opening, closing)
            # A count above the trusted one means that a text of the caller became control text after all. It
            # was either joined with its neighbours' text or unfenced by the template. Fences at each text's
            # edges prevent the former.
            if self._count("\0".join(text for text, fenced in pieces if not fenced)) == trusted:
                return self._encode(pieces, max_tokens)
        raise RequestError(
            "a message spells a control token that the chat template does not keep as text", param="messages"
        )

    @property
    def _controls(self) -> ControlStrings:
        return self._vocabulary.control_strings

    def _check(self, conversation: Conversation) -> None:
        if conversation.tools and not self._has_tools:
            raise RequestError(
                "this model's chat template has no tools", param="tools", code="unsupported_parameter"
            )
        for name in conversation.variables:
            if name in self._own_variables:
                raise RequestError(
                    f"chat_template_kwargs sets {name[:40]}, which only the server sets",
                    param="chat_template_kwargs",
                )

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        """Return the template's variables as JSON values of their own, in the form that templates expect."""
        own = {
            "messages": [self._message(turn) for turn in conversation.turns],
            "tools": [_function(tool) for tool in conversation.tools] or None,
            "add_generation_prompt": conversation.add_generation_prompt and not conversation.continues,
        }
        return {**conversation.variables, **own}

    def _message(self, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": _Own(turn.role), "content": turn.content}
        if turn.reasoning:
            # Templates know one of three names. The last one goes with a content or with calls.
            names = ["reasoning_content", "reasoning", *([] if turn.content and turn.calls else ["thinking"])]
            message |= dict.fromkeys(names, turn.reasoning)
        if turn.calls:
            message["tool_calls"] = [self._call(call) for call in turn.calls]
        if turn.call_id:
            message["tool_call_id"] = self._call_id(turn.call_id)
        if turn.name:
            message["name"] = turn.name
        return _own(message)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments if self._arguments_as_text else json.loads(call.arguments)
        function = _own({"name": call.name, "arguments": arguments})
        return _own({"type": _Own("function"), "id": self._call_id(call.id), "function": function})

    def _call_id(self, given: str) -> str:
        size = self._call_id_chars
        if size is None or (len(given) == size and given.isascii() and given.isalnum()):
            return given
        return hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:size]

    def _fence(self, text: str, *, opening: str, closing: str, at_edges: bool) -> str:
        fenced = self._controls.sub(lambda found: f"{opening}{found}{closing}", text)
        return _around_core(fenced, opening + closing) if at_edges and text not in _SCHEMA_WORDS else fenced

    def _rendered(self, variables: Mapping[str, Any], cut: str, change: _Change) -> str:
        text = self._render({name: _changed(value, change) for name, value in variables.items()})
        if not cut:
            return text
        end = text.rfind(cut)
        if end < 0:
            raise RequestError(
                "the chat template does not keep the message that is to be continued",
                param="continue_final_message",
            )
        return text[:end]

    def _count(self, text: str) -> Counter[str]:
        return Counter(self._controls.findall(text))

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


def read_messages(messages: object) -> tuple[Turn, ...]:
    """Check messages and flatten their content to text. Raises RequestError naming the place of a fault."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages is not a list of at least one message", param="messages")
    return tuple(_read_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _read_message(message: object, place: str) -> Turn:
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
    return Turn(role_of(role), _read_content(content, place))


def role_of(given: str) -> Role:
    """Return the role that templates know: "developer" is OpenAI's newer name for "system"."""
    roles: dict[str, Role] = {"user": "user", "assistant": "assistant", "tool": "tool"}
    return roles.get(given, "system")


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


class _Own(str):
    """Mark a text of this module, such as a role or a field's name, that stays as it is."""

    __slots__ = ()


def _own(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {_Own(name): value for name, value in fields.items()}


def _function(tool: Tool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return _own({"type": _Own("function"), "function": _own(fields)})


def _changed(value: Any, change: _Change) -> Any:
    """Return a JSON value with each of the caller's texts changed; the names of its fields are texts too."""
    match value:
        case _Own():
            return value
        case str():
            return change(value)
        case list() | tuple():
            return [_changed(item, change) for item in value]
        case Mapping():
            return {_changed(name, change): _changed(item, change) for name, item in value.items()}
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield the caller's texts in a JSON value."""
    match value:
        case _Own():
            return
        case str():
            yield value
        case list() | tuple():
            for item in value:
                yield from _texts(item)
        case Mapping():
            for name, item in value.items():
                yield from _texts(name)
                yield from _texts(item)


def _mark_end(messages: list[dict[str, Any]], mark: str) -> None:
    """Put ``mark`` behind the last text of the last message, inside white space that templates may strip."""
    last = messages[-1]
    names = [name for name in ("content", "reasoning_content", "reasoning", "thinking") if last.get(name)]
    for name in names[:1] if last["content"] else names or ["content"]:
        text = last[name]
        core = text.rstrip()
        last[name] = f"{core}{mark}{text[len(core) :]}"


def _choose_fences(texts: Sequence[str]) -> tuple[str, str, str]:
    free = [fence for fence in _FENCES if not any(fence in text for text in texts)]
    if len(free) < _NUM_FENCES:
        text = "the messages hold nearly every Unicode noncharacter, expected text"
        raise RequestError(text, param="messages")
    return free[0], free[1], free[2]


def _around_core(text: str, fence: str) -> str:
    """Put a fence before and behind ``text``, inside its outer white space, which templates may strip."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{fence}{core}{fence}{text[start + len(core) :]}"


def _hollow(fence: str, strings: ControlStrings, text: str) -> str:
    """Return ``text`` with fences in place of its control strings, and at its edges if these may join others.

    Control strings in the rendered result are then the template's own.
    """
    hollow = strings.sub(lambda _: fence, text)
    if text in _SCHEMA_WORDS or not strings.may_join(hollow.strip()):
        return hollow
    return _around_core(hollow, fence)


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
