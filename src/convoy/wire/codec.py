"""Messages to bytes and back: msgpack arrays in field order, one decoder per frame type, nothing looked up by
name.
"""

from __future__ import annotations

import msgspec

from convoy.errors import FrameError
from convoy.wire.messages import (
    MESSAGE_TYPES,
    BlocksDone,
    Bye,
    FrameType,
    Hello,
    Message,
    Plan,
    Refuse,
    StepFailed,
)
from convoy.wire.text import plain_text, require_plain

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
        message = decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"a {kind.name} of {len(payload)} bytes is not the message its type says") from None
    return _made_plain(message)


# Text that people read, and the characters that are kept of it.
_PROSE: dict[type[Message], dict[str, int]] = {
    Hello: {"software": 100, "platform": 200},
    Refuse: {"reason": 500, "hint": 500},
    StepFailed: {"reason": 500},
    BlocksDone: {"error": 500},
    Bye: {"reason": 200},
}


def _made_plain(message: Message) -> Message:
    """``message`` with its text harmless; see `wire.text`. Raises `FrameError` for a name that is not."""
    prose = _PROSE.get(type(message))
    if prose is not None:
        kept = {name: plain_text(getattr(message, name), limit) for name, limit in prose.items()}
        message = msgspec.structs.replace(message, **kept)
    match message:
        case Hello(dtypes=dtypes, kernels=kernels):
            names = [*dtypes, *kernels]
        case Plan(model=model, model_digest=digest, kernel=kernel, activation_dtype=dtype, stages=stages):
            names = [model, digest, kernel, dtype, *(stage.member for stage in stages)]
        case _:
            return message
    for name in names:
        require_plain(name, f"a name in a {type(message).__name__}")
    return message
