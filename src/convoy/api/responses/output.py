"""Turn the pieces of an assistant's turn into output items and their events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
    name there. ``item_id`` makes an item's id from its prefix and its place. With ``summarise`` a reasoning
    is given as its own summary. With ``encode`` it also has an ``encrypted_content``, for clients that send
    back nothing else.
    """

    def __init__(
        self,
        number: Number,
        sources: Mapping[str, tuple[str, str]],
        *,
        item_id: Callable[[str, int], str],
        summarise: bool = False,
        encode: bool = False,
    ) -> None:
        self.items: list[Item] = []
        # The same output as a turn of the conversation.
        self.turn = Turn("assistant")
        self._number = number
        self._item_id = item_id
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
        place = _Place(self._number, len(self.items), self._item_id)
        match piece:
            case TextPiece():
                return _TextItem(place)
            case ReasoningPiece() if self._summarise:
                return _Summary(place, encode=self._encode)
            case ReasoningPiece():
                return _Reasoning(place, encode=self._encode)
            case CallPiece():
                return _Call(place, piece, self._sources.get(piece.name, ("", piece.name)))


@dataclass(frozen=True, slots=True)
class _Place:
    """Hold an item's index in the output, and the makers of event numbers and of item ids."""

    number: Number
    index: int
    item_id: Callable[[str, int], str]

    def new_id(self, prefix: str) -> str:
        return self.item_id(prefix, self.index)


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


@dataclass(frozen=True, slots=True)
class _Form:
    """Hold the events of one kind of text, in the order in which they are sent."""

    part: Callable[[str], OutputText | ReasoningText | SummaryText]
    begin: Callable[..., Event]
    add: Callable[..., Event]
    done: Callable[..., Event]
    end: Callable[..., Event]


_TEXT = _Form(OutputText, PartAdded, TextAdded, TextDone, PartDone)
_REASONING = _Form(ReasoningText, PartAdded, ReasoningAdded, ReasoningDone, PartDone)
_SUMMARY = _Form(SummaryText, SummaryPartAdded, SummaryAdded, SummaryDone, SummaryPartDone)


class _TextItem:
    """Grow an item that is one part of text."""

    _form = _TEXT
    _piece: type[Piece] = TextPiece
    _prefix = "msg_"

    def __init__(self, place: _Place) -> None:
        self._number, self._index, self._id = place.number, place.index, place.new_id(self._prefix)
        self._texts: list[str] = []

    def accepts(self, piece: Piece) -> bool:
        return isinstance(piece, self._piece)

    def opening(self) -> list[Event]:
        return [self._event(self._form.begin, part=self._form.part(""))]

    def delta(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self._event(self._form.add, delta=text)]

    def closing(self) -> list[Event]:
        done = self._event(self._form.done, text=self._text)
        return [done, self._event(self._form.end, part=self._form.part(self._text))]

    def item(self, status: ItemStatus) -> Item:
        return MessageItem(self._id, status, () if status == "in_progress" else (OutputText(self._text),))

    def join(self, turn: Turn) -> Turn:
        return replace(turn, content=turn.content + self._text)

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _event(self, kind: Callable[..., Event], **fields: object) -> Event:
        return kind(item_id=self._id, output_index=self._index, sequence_number=self._number(), **fields)


class _Reasoning(_TextItem):
    """Give a reasoning as content."""

    _form = _REASONING
    _piece = ReasoningPiece
    _prefix = "rs_"

    def __init__(self, place: _Place, *, encode: bool) -> None:
        super().__init__(place)
        self._encode = encode

    def item(self, status: ItemStatus) -> Item:
        content = () if status == "in_progress" else (ReasoningText(self._text),)
        return ReasoningItem(self._id, status, content=content, encrypted_content=self._encoded(status))

    def join(self, turn: Turn) -> Turn:
        return replace(turn, reasoning=turn.reasoning + self._text)

    def _encoded(self, status: ItemStatus) -> str | None:
        return encode_reasoning(self._text) if self._encode and status != "in_progress" else None


class _Summary(_Reasoning):
    """Give a reasoning as its own summary."""

    _form = _SUMMARY

    def item(self, status: ItemStatus) -> Item:
        summary = () if status == "in_progress" else (SummaryText(self._text),)
        return ReasoningItem(self._id, status, summary=summary, encrypted_content=self._encoded(status))


class _Call:
    def __init__(self, place: _Place, first: CallPiece, source: tuple[str, str]) -> None:
        """Begin the call of ``first``; ``source`` is its namespace and its name there."""
        self._number, self._index, self._id = place.number, place.index, place.new_id("fc_")
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
