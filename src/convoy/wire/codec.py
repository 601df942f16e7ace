"""Messages to bytes and back: msgpack arrays in field order, one decoder per frame type, nothing looked up by
name.
"""

from __future__ import annotations

import msgspec

from convoy.errors import FrameError
from convoy.wire.messages import MESSAGE_TYPES, FrameType, Message

_TYPE_OF: dict[type[Message], FrameType] = {message: kind for kind, message in MESSAGE_TYPES.items()}
_DECODERS: dict[FrameType, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(message) for kind, message in MESSAGE_TYPES.items()
}
_encoder = msgspec.msgpack.Encoder()


def frame_type_of(message: Message) -> FrameType:
    """The frame type that carries ``message``."""
    return _TYPE_OF[type(message)]


def encode_message(message: Message) -> bytes:
    """The payload of ``message``'s frame, before sealing."""
    return _encoder.encode(message)


def decode_message(kind: FrameType, payload: bytes | bytearray | memoryview) -> Message:
    """The message in a payload that opened. Raises `FrameError`, without quoting the payload."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise FrameError(f"a {kind.name} carries no message")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"a {kind.name} of {len(payload)} bytes is not the message its type says") from None
