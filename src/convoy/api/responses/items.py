"""Read the items of a Responses request as turns of a conversation.

An item is a message, a call, a call's result or a reasoning. Clients send back the items of earlier answers,
also of kinds that this server never makes. Those are dropped and counted, so that a history from another
server can be continued here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convoy.api.body.arguments import read_arguments
from convoy.api.refusals import UnknownResponse
from convoy.api.responses.tools import flat_name
from convoy.errors import RequestError
from convoy.model.text.conversation import Role, ToolCall, Turn

# A developer's message is a system message under a newer name.
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})
_MEDIA_PARTS = frozenset({"input_image", "input_file", "input_audio", "image_url", "file", "audio"})
_ENCODED = "convoy."
UNKNOWN_ITEM = "item_not_found"
SEND_ITEM = "send the item itself, as clients do with store: false"
FindItem = Callable[[str, str], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ItemHistory:
    """Hold the turns of a request, and the types of items and parts that were dropped."""

    turns: tuple[Turn, ...]
    dropped: tuple[str, ...] = ()


def is_reference(item: Mapping[str, Any]) -> bool:
    """Return whether an item names a stored one. A reference may come without its type."""
    return item.get("type") == "item_reference" or set(item) == {"id"}


def nothing_stored(item: str, param: str) -> Mapping[str, Any]:  # noqa: ARG001 - no id names an item
    """Find no item, because the server stores none. Raises `UnknownResponse`."""
    raise UnknownResponse(
        f"this server stores no responses, so {param} names no item",
        param=param,
        code=UNKNOWN_ITEM,
        hint=f"{SEND_ITEM}; --store-responses turns the store on",
    )


def read_items(
    given: str | Sequence[Any],
    earlier: Sequence[Turn] = (),
    *,
    max_items: int,
    stored: FindItem = nothing_stored,
) -> ItemHistory:
    """Return the turns of ``given``, which follow those of ``earlier``. Text is one turn of the user.

    ``stored`` returns the item that a reference names, by its id; its second argument is the field at fault.

    Raises `RequestError` with the field's name for a wrong role, a missing field, an image or a document, a
    result of a call that was never made, and more than ``max_items`` items or parts.
    """
    reader = _Reader(max_items, stored)
    for turn in earlier:
        reader.resume(turn)
    if isinstance(given, str):
        return ItemHistory((*reader.end(), Turn("user", given)), tuple(reader.dropped))
    if not given:
        raise RequestError("input is empty, expected text or at least one item", param="input")
    for index, item in enumerate(given):
        reader.read(item, f"input[{index}]")
    turns = tuple(reader.end())
    if not turns:
        raise RequestError("input has no item that this server can read", param="input")
    return ItemHistory(turns, tuple(reader.dropped))


def encode_reasoning(text: str) -> str:
    """Return a reasoning's text as its ``encrypted_content``.

    It is encoded and not encrypted: the client has the text anyway. Some clients send this field back and
    neither the summary nor the content.
    """
    return _ENCODED + base64.urlsafe_b64encode(text.encode()).decode()


class _Reader:
    """Collect turns. An assistant's reasoning, text and calls become one turn, as they were generated."""

    def __init__(self, max_items: int, stored: FindItem) -> None:
        self.dropped: list[str] = []
        self._stored = stored
        self._turns: list[Turn] = []
        self._names: dict[str, str] = {}
        self._cut_calls: set[str] = set()
        self._open: Turn | None = None
        # The reasoning of the open turn. It is joined once, because a request may have thousands of items.
        self._reasonings: list[str] = []
        self._left = max_items
        self._max_items = max_items

    def resume(self, turn: Turn) -> None:
        """Add a turn of a stored response, without the calls and the reasoning that `read` would drop."""
        calls = tuple(call for given in turn.calls if (call := self._kept_call(given)) is not None)
        if turn.content or calls or not (turn.calls or turn.reasoning):
            self._turns.append(replace(turn, calls=calls))
        elif turn.reasoning:
            self.dropped.append("reasoning")

    def read(self, item: Any, where: str) -> None:
        """Read one item. Raises `RequestError`."""
        self._count(where)
        if not isinstance(item, dict):
            raise RequestError(f"{where} is not an object", param=where, code="invalid_type")
        if is_reference(item):
            item = self._stored(_text(item, "id", where), f"{where}.id")
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._result(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case _:
                self.dropped.append(str(kind))

    def end(self) -> list[Turn]:
        """Return the turns, once every item is read."""
        self._close()
        return self._turns

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = ROLES.get(_text(item, "role", where))
        if role is None:
            raise RequestError(
                f"{where}.role is {item['role'][:40]!r}, expected one of: {', '.join(ROLES)}",
                param=f"{where}.role",
            )
        text = self._content(item, "content", where)
        if role != "assistant":
            self._close()
            self._turns.append(Turn(role, text))
            return
        if self._open is not None and (self._open.content or self._open.calls):
            self._close()
        self._open = replace(self._open or Turn("assistant"), content=text)

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        namespace = _text(item, "namespace", where) if item.get("namespace") else ""
        name = flat_name(namespace, _text(item, "name", where))
        call_id, arguments = _text(item, "call_id", where), _text(item, "arguments", where)
        call = self._add_call(call_id, name, read_arguments(arguments, f"{where}.arguments"))
        if call is not None:
            turn = self._open or Turn("assistant")
            self._open = replace(turn, calls=(*turn.calls, call))

    def _kept_call(self, given: ToolCall) -> ToolCall | None:
        """Return a call of a stored response, or None if a client could not send it back either."""
        try:
            arguments = read_arguments(given.arguments, "arguments")
        except RequestError:
            arguments = None
        return self._add_call(given.id, given.name, arguments)

    def _add_call(self, call_id: str, name: str, arguments: str | None) -> ToolCall | None:
        """Return a call whose result may follow, or None for one without valid arguments."""
        if arguments is None:
            # The call was cut off. Its result says no more than that, and is dropped with it.
            self._cut_calls.add(call_id)
            self.dropped.append("function_call")
            return None
        # A client may use an id again.
        self._cut_calls.discard(call_id)
        self._names[call_id] = name
        return ToolCall(call_id, name, arguments)

    def _result(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _text(item, "call_id", where)
        if call_id in self._cut_calls:
            self.dropped.append("function_call_output")
            return
        if call_id not in self._names:
            param = f"{where}.call_id"
            raise RequestError(f"{param} names no function_call before it", param=param)
        text = self._content(item, "output", where)
        self._close()
        self._turns.append(Turn("tool", text, call_id=call_id, name=self._names[call_id]))

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        text = (
            self._thoughts(item, "content", where)
            or _decode_reasoning(item.get("encrypted_content"))
            or self._thoughts(item, "summary", where)
        )
        if not text:
            self.dropped.append("reasoning")
            return
        if self._open is not None and (self._open.content or self._open.calls):
            self._close()
        self._open = self._open or Turn("assistant")
        self._reasonings.append(text)

    def _close(self) -> None:
        if self._open is None:
            return
        turn = replace(self._open, reasoning="\n".join(self._reasonings))
        self._open = None
        self._reasonings.clear()
        if turn.content or turn.calls or not turn.reasoning:
            self._turns.append(turn)
        else:
            # The answer was cut off while the model reasoned. No template has a turn of reasoning alone.
            self.dropped.append("reasoning")

    def _content(self, item: Mapping[str, Any], field: str, where: str) -> str:
        """Return a message's or a result's text: text, or a list of parts."""
        given, where = item.get(field), f"{where}.{field}"
        if given is None:
            raise RequestError(f"{where} is missing, expected text or a list of parts", param=where)
        if isinstance(given, str):
            return given
        texts = []
        for number, part in enumerate(_parts(given, where)):
            place = f"{where}[{number}]"
            self._count(place)
            # A list or an object is no key of a set.
            kind = str(part.get("type"))
            if kind in _TEXT_PARTS:
                texts.append(_text(part, "refusal" if kind == "refusal" else "text", place))
            elif kind in _MEDIA_PARTS:
                param = f"{place}.type"
                text = f"{param} is {kind!r}, and this server takes only text"
                raise RequestError(text, param=param, code="unsupported_parameter")
            else:
                self.dropped.append(kind)
        return "".join(texts)

    def _thoughts(self, item: Mapping[str, Any], field: str, where: str) -> str:
        given = item.get(field)
        parts = _parts(given, f"{where}.{field}") if given is not None else []
        return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))

    def _count(self, where: str) -> None:
        self._left -= 1
        if self._left < 0:
            limit = f"input has more than {self._max_items} items and parts of content"
            raise RequestError(f"{limit}, and that is the limit", param=where)


def _parts(given: Any, where: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise RequestError(f"{where}: expected text or a list of objects", param=where, code="invalid_type")
    return given


def _text(item: Mapping[str, Any], field: str, where: str) -> str:
    """Return a required text of an item. Raises `RequestError`."""
    value, param = item.get(field), f"{where}.{field}"
    if value is None:
        raise RequestError(f"{param}: it is missing", param=param, code="missing_required_parameter")
    if not isinstance(value, str):
        raise RequestError(f"{param}: expected text", param=param, code="invalid_type")
    return value


def _decode_reasoning(given: Any) -> str:
    """Return the text that `encode_reasoning` encoded, or "" for another server's content."""
    if not isinstance(given, str) or not given.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_ENCODED), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
