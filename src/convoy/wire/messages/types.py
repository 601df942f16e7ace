"""The message of each frame type: one closed set, looked up by number and never by name.

A message belongs to it if its class, in one of the modules here, has a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from convoy.wire.messages import control, evidence, fetch, link, ranks
from convoy.wire.messages.control import FrameType, Message


def _messages() -> Iterator[type[Message]]:
    for module in (control, evidence, fetch, link, ranks):
        for value in vars(module).values():
            is_message = isinstance(value, type) and issubclass(value, Message) and "frame" in vars(value)
            if is_message and value.__module__ == module.__name__:
                yield value


def _by_type() -> dict[FrameType, type[Message]]:
    found: dict[FrameType, type[Message]] = {}
    for message in sorted(_messages(), key=lambda message: message.frame.type):
        kind = message.frame.type
        assert kind not in found, f"{message.__name__} and {found[kind].__name__} have one frame type"
        found[kind] = message
    return found


MESSAGE_TYPES: dict[FrameType, type[Message]] = _by_type()
