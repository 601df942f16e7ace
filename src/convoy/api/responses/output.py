"""Turn the pieces of an assistant's turn into output items and their events."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from msgspec import UNSET

from convoy.api.responses.items import encode_reasoning
from convoy.api.responses.shapes import (
    ArgumentsAdded,
    ArgumentsDone,
    CallItem,
    Event,
    Item,
    ItemAdded,
    ItemDone,
    ItemStatus,
    MessageItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningAdded,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    SummaryAdded,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryText,
    TextAdded,
    TextDone,
)
from convoy.model.text.conversation import ToolCall, Turn
from convoy.model.text.pieces import CallPiece, Piece, ReasoningPiece, TextPiece

Number = Callable[[], int]


class OutputWriter:
    """Collect pieces as items, and return the events of each piece. Items never interleave.

    ``number`` returns the number of the next event. ``sources`` maps a tool's name to its namespace and its
    name there. With ``summarise`` a reasoning is given as its own summary. With ``encode`` it also has an
    ``encrypted_content``, for clients that send back nothing else.
    """

    def __init__(
        self,
        number: Number,
        sources: Mapping[str, tuple[str, str]],
        *,
        summarise: bool = False,
        encode: bool = False,
    ) -> None:
        self.items: list[Item] = []
        # The same output as a turn of the conversation.
        self.turn = Turn("assistant")
        self._number = number
        self._sources = sources
        self._summarise = summarise
        self._encode = encode
        self._open: _OpenItem | None = None

    @property
    def began(self) -> bool:
        """Return whether there is an item, open or ended."""
        return self._open is not None or bool(self.items)

    def write(self, piece: Piece) -> list[Event]:
        """Return the events that a piece adds, with those that end the item before it."""
        events: list[Event] = []
        if self._open is None or not self._open.accepts(piece):
            events += self.close("completed")
            self._open = self._begin(piece)
            item = self._open.item("in_progress")
            events.append(ItemAdded(output_index=len(self.items), item=item, sequence_number=self._number()))
            events += self._open.opening()
        delta = piece.arguments if isinstance(piece, CallPiece) else piece.text
        return [*events, *self._open.delta(delta)] if delta else events

    def close(self, status: ItemStatus) -> list[Event]:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return []
        opened, self._open = self._open, None
        # The text of an item that was cut off is not repeated as if it were whole: only the item says so.
        events = opened.closing() if status == "completed" else []
        item = opened.item(status)
        events.append(ItemDone(output_index=len(self.items), item=item, sequence_number=self._number()))
        self.items.append(item)
        self.turn = opened.join(self.turn)
        return events

    def _begin(self, piece: Piece) -> _OpenItem:
        index = len(self.items)
        match piece:
            case TextPiece():
                return _Message(self._number, index)
            case ReasoningPiece() if self._summarise:
                return _Summary(self._number, index, encode=self._encode)
            case ReasoningPiece():
                return _Reasoning(self._number, index, encode=self._encode)
            case CallPiece():
                return _Call(self._number, index, piece, self._sources.get(piece.name, ("", piece.name)))


class _OpenItem(Protocol):
    """Declare an item that still grows."""

    def accepts(self, piece: Piece) -> bool:
        """Return whether ``piece`` belongs to this item."""
        ...

    def opening(self) -> list[Event]:
        """Return the events between the item's begin and its first text."""
        ...

    def delta(self, text: str) -> list[Event]:
        """Add text and return its event."""
        ...

    def closing(self) -> list[Event]:
        """Return the events between the last text and the item's end."""
        ...

    def item(self, status: ItemStatus) -> Item:
        """Return the item. In progress it has no content yet."""
        ...

    def join(self, turn: Turn) -> Turn:
        """Return ``turn`` with this item."""
        ...


class _Message:
    def __init__(self, number: Number, index: int) -> None:
        self._number, self._index, self._id = number, index, _new_id("msg_")
        self._texts: list[str] = []

    def accepts(self, piece: Piece) -> bool:
        return isinstance(piece, TextPiece)

    def opening(self) -> list[Event]:
        added = PartAdded(
            item_id=self._id, output_index=self._index, part=OutputText(""), sequence_number=self._number()
        )
        return [added]

    def delta(self, text: str) -> list[Event]:
        self._texts.append(text)
        added = TextAdded(
            item_id=self._id, output_index=self._index, delta=text, sequence_number=self._number()
        )
        return [added]

    def closing(self) -> list[Event]:
        text = "".join(self._texts)
        place = (self._id, self._index)
        done = TextDone(item_id=place[0], output_index=place[1], text=text, sequence_number=self._number())
        part = OutputText(text)
        end = PartDone(item_id=place[0], output_index=place[1], part=part, sequence_number=self._number())
        return [done, end]

    def item(self, status: ItemStatus) -> Item:
        content = () if status == "in_progress" else (OutputText("".join(self._texts)),)
        return MessageItem(self._id, status, content)

    def join(self, turn: Turn) -> Turn:
        return replace(turn, content=turn.content + "".join(self._texts))


class _Reasoning:
    """Give a reasoning as content."""

    def __init__(self, number: Number, index: int, *, encode: bool) -> None:
        self._number, self._index, self._id = number, index, _new_id("rs_")
        self._encode = encode
        self._texts: list[str] = []

    def accepts(self, piece: Piece) -> bool:
        return isinstance(piece, ReasoningPiece)

    def opening(self) -> list[Event]:
        part = ReasoningText("")
        added = PartAdded(
            item_id=self._id, output_index=self._index, part=part, sequence_number=self._number()
        )
        return [added]

    def delta(self, text: str) -> list[Event]:
        self._texts.append(text)
        added = ReasoningAdded(
            item_id=self._id, output_index=self._index, delta=text, sequence_number=self._number()
        )
        return [added]

    def closing(self) -> list[Event]:
        text = "".join(self._texts)
        done = ReasoningDone(
            item_id=self._id, output_index=self._index, text=text, sequence_number=self._number()
        )
        part = ReasoningText(text)
        end = PartDone(item_id=self._id, output_index=self._index, part=part, sequence_number=self._number())
        return [done, end]

    def item(self, status: ItemStatus) -> Item:
        if status == "in_progress":
            return ReasoningItem(self._id, status, content=())
        text = "".join(self._texts)
        encoded = encode_reasoning(text) if self._encode else None
        return ReasoningItem(self._id, status, content=(ReasoningText(text),), encrypted_content=encoded)

    def join(self, turn: Turn) -> Turn:
        return replace(turn, reasoning=turn.reasoning + "".join(self._texts))


class _Summary(_Reasoning):
    """Give a reasoning as its own summary."""

    def opening(self) -> list[Event]:
        part = SummaryText("")
        added = SummaryPartAdded(
            item_id=self._id, output_index=self._index, part=part, sequence_number=self._number()
        )
        return [added]

    def delta(self, text: str) -> list[Event]:
        self._texts.append(text)
        added = SummaryAdded(
            item_id=self._id, output_index=self._index, delta=text, sequence_number=self._number()
        )
        return [added]

    def closing(self) -> list[Event]:
        text = "".join(self._texts)
        done = SummaryDone(
            item_id=self._id, output_index=self._index, text=text, sequence_number=self._number()
        )
        part = SummaryText(text)
        end = SummaryPartDone(
            item_id=self._id, output_index=self._index, part=part, sequence_number=self._number()
        )
        return [done, end]

    def item(self, status: ItemStatus) -> Item:
        if status == "in_progress":
            return ReasoningItem(self._id, status)
        text = "".join(self._texts)
        encoded = encode_reasoning(text) if self._encode else None
        return ReasoningItem(self._id, status, summary=(SummaryText(text),), encrypted_content=encoded)


class _Call:
    def __init__(self, number: Number, index: int, first: CallPiece, source: tuple[str, str]) -> None:
        """Begin the call of ``first``; ``source`` is its namespace and its name there."""
        self._number, self._index, self._id = number, index, _new_id("fc_")
        self._first = first
        self._namespace, self._name = source
        self._texts: list[str] = []

    def accepts(self, piece: Piece) -> bool:
        return isinstance(piece, CallPiece) and piece.index == self._first.index

    def opening(self) -> list[Event]:
        return []

    def delta(self, text: str) -> list[Event]:
        self._texts.append(text)
        added = ArgumentsAdded(
            item_id=self._id, output_index=self._index, delta=text, sequence_number=self._number()
        )
        return [added]

    def closing(self) -> list[Event]:
        arguments = "".join(self._texts)
        done = ArgumentsDone(
            item_id=self._id,
            output_index=self._index,
            name=self._name,
            arguments=arguments,
            sequence_number=self._number(),
        )
        return [done]

    def item(self, status: ItemStatus) -> Item:
        arguments = "" if status == "in_progress" else "".join(self._texts)
        namespace = self._namespace or UNSET
        return CallItem(self._id, self._first.id, self._name, arguments, status, namespace)

    def join(self, turn: Turn) -> Turn:
        call = ToolCall(self._first.id, self._first.name, "".join(self._texts))
        return replace(turn, calls=(*turn.calls, call))


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
