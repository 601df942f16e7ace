"""Encode and decode messages: msgpack arrays in field order, one decoder per frame type.

No class is ever looked up by a name from the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

import msgspec

from convoy.errors import FrameError
from convoy.wire.frame import RECORD_BYTES
from convoy.wire.messages.control import (
    MAX_STEP_BIASES,
    MAX_STEP_BLOCKS,
    BlockGrant,
    Entries,
    FrameType,
    Message,
    Released,
    Row,
    SampleRequest,
    Step,
)
from convoy.wire.messages.ranks import RankStep
from convoy.wire.messages.types import MESSAGE_TYPES
from convoy.wire.text import plain_text, require_plain

Payload = bytes | bytearray | memoryview
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode_message(message: Message) -> bytes:
    """Return the payload of ``message``'s frame, before sealing."""
    return _encoder.encode(message)


def decode_message(kind: FrameType, payload: Payload) -> Message:
    """Return the message in an opened payload. Raises `FrameError`, without quoting the payload."""
    decode = _DECODERS.get(kind)
    if decode is None:
        raise FrameError(f"a {kind.name} carries no message")
    try:
        message = decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"a {kind.name} of {len(payload)} bytes is not the message its type says") from None
    return _made_plain(message)


class _StepParts(Message, frozen=True):
    """Hold a `Step` with its nested lists still undecoded."""

    number: int
    released: Released
    grants: Annotated[list[msgspec.Raw], Entries]
    rows: Annotated[list[Row], Entries]
    tokens: bytes
    samples: Annotated[list[msgspec.Raw], Entries] = msgspec.field(default_factory=list)


class _RankStepParts(Message, frozen=True):
    """Hold a `RankStep` with its step still undecoded."""

    step: msgspec.Raw
    hidden: bool
    output: bool


_step = msgspec.msgpack.Decoder(Step)
_rank_step_parts = msgspec.msgpack.Decoder(_RankStepParts)
_step_parts = msgspec.msgpack.Decoder(_StepParts)
_grant = msgspec.msgpack.Decoder(BlockGrant)
_sample_request = msgspec.msgpack.Decoder(SampleRequest)


def _decode_step(payload: Payload) -> Step:
    return _decode_long_step(payload) if len(payload) > RECORD_BYTES else _step.decode(payload)


def _decode_long_step(payload: Payload) -> Step:
    """Decode a long step entry by entry, and count blocks and biases on the way.

    A bias of 3 bytes takes 88 in memory, and a frame has room for millions.
    """
    parts = _step_parts.decode(payload)
    grants = _decode_each(parts.grants, _grant, lambda grant: len(grant.blocks), MAX_STEP_BLOCKS)
    samples = _decode_each(
        parts.samples, _sample_request, lambda sample: len(sample.logit_bias), MAX_STEP_BIASES
    )
    return Step(parts.number, parts.released, grants, parts.rows, parts.tokens, samples)


def _decode_rank_step(payload: Payload) -> RankStep:
    parts = _rank_step_parts.decode(payload)
    is_long = len(payload) > RECORD_BYTES
    step = _decode_long_step(memoryview(parts.step)) if is_long else _step.decode(parts.step)
    if step.samples:
        raise FrameError(f"a RANK_STEP has {len(step.samples)} samples, which are rank 0's")
    return RankStep(step, parts.hidden, parts.output)


def _decode_each(
    raw: Iterable[msgspec.Raw], decoder: msgspec.msgpack.Decoder[T], count: Callable[[T], int], most: int
) -> list[T]:
    found: list[T] = []
    total = 0
    for one in raw:
        found.append(decoder.decode(one))
        total += count(found[-1])
        if total > most:
            raise FrameError(f"a STEP has more than {most} blocks or biases in all")
    return found


# The messages with lists that no frame's size bounds enough.
_SPECIAL: dict[type[Message], Callable[[Payload], Message]] = {
    Step: _decode_step,
    RankStep: _decode_rank_step,
}
_DECODERS: dict[FrameType, Callable[[Payload], Message]] = {
    kind: _SPECIAL.get(message) or msgspec.msgpack.Decoder(message).decode
    for kind, message in MESSAGE_TYPES.items()
}


def _made_plain(message: Message) -> Message:
    """Return ``message`` with its text made harmless; see `wire.text`.

    Raises `FrameError` for a name that cannot be printed or is too long.
    """
    prose = message.frame.prose
    if prose:
        kept = {name: plain_text(getattr(message, name), limit) for name, limit in prose.items()}
        message = msgspec.structs.replace(message, **kept)
    for name in message.names():
        require_plain(name, f"a name in a {type(message).__name__}")
    return message
