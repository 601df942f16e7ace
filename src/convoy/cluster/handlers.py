"""The table of handlers of one side: which code handles each frame that this side may receive.

A head and a peer have one table each, made where its parts are put together. Every frame that a link lets
through has a row; `tests/cluster/test_handlers.py` compares the tables with the rows of the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from convoy.transport.link.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.wire.messages.control import FrameType, Message

M = TypeVar("M", bound=Message)

# Receiver threads call a handler, so it must not wait for anything but room in a queue.
Handler = Callable[[Link, Received], None]
Row = tuple[FrameType, Handler]


def on(kind: type[M], handle: Callable[[Link, M], None]) -> Row:
    """Return the row of a handler that needs only the message, not the fields of its frame's header."""

    def handle_message(link: Link, received: Received) -> None:
        assert isinstance(received, ReceivedMessage)
        assert isinstance(received.message, kind)
        handle(link, received.message)

    return kind.frame.type, handle_message


def on_frame(*kinds: type[Message] | FrameType, handle: Handler) -> list[Row]:
    """Return the rows of a handler of whole frames: messages, by class, and tensors, by frame type."""
    return [(kind if isinstance(kind, FrameType) else kind.frame.type, handle) for kind in kinds]


class HandlerTable:
    """Call the handler of each frame. A frame without a row ends its link."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._handlers: dict[FrameType, Handler] = {}
        for kind, handle in rows:
            assert kind not in self._handlers, f"a {kind.name} has two handlers"
            self._handlers[kind] = handle

    @property
    def types(self) -> frozenset[FrameType]:
        """Return the frame types that have a handler."""
        return frozenset(self._handlers)

    def handle(self, link: Link, received: Received) -> None:
        """Handle a frame. Raises the errors of its handler."""
        kind = received.kind if isinstance(received, ReceivedTensor) else received.message.frame.type
        handle = self._handlers.get(kind)
        if handle is None:
            link.dismiss(f"this member has no use for a {kind.name}")
            return
        handle(link, received)
