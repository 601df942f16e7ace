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
    BlocksDone,
    Bye,
    Entries,
    FrameType,
    Hello,
    Message,
    Plan,
    Refuse,
    Released,
    Row,
    SampleRequest,
    Step,
    StepFailed,
)
from convoy.wire.messages.fetch import Fetch, Held, Piece, Prepare, Prepared
from convoy.wire.messages.ranks import Agree, RankStep
from convoy.wire.messages.types import MESSAGE_TYPES
from convoy.wire.text import plain_text, require_plain

_TYPE_OF: dict[type[Message], FrameType] = {message: kind for kind, message in MESSAGE_TYPES.items()}
_DECODERS: dict[FrameType, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(message) for kind, message in MESSAGE_TYPES.items()
}
_encoder = msgspec.msgpack.Encoder()


def frame_type_of(message: Message) -> FrameType:
    """Return the frame type that carries ``message``."""
    return _TYPE_OF[type(message)]


def encode_message(message: Message) -> bytes:
    """Return the payload of ``message``'s frame, before sealing."""
    return _encoder.encode(message)


def decode_message(kind: FrameType, payload: bytes | bytearray | memoryview) -> Message:
    """Return the message in an opened payload. Raises `FrameError`, without quoting the payload."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise FrameError(f"a {kind.name} carries no message")
    try:
        if kind is FrameType.STEP and len(payload) > RECORD_BYTES:
            return _decode_long_step(payload)
        if kind is FrameType.RANK_STEP:
            return _decode_rank_step(payload)
        message = decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"a {kind.name} of {len(payload)} bytes is not the message its type says") from None
    return _made_plain(message)


T = TypeVar("T")


class _StepParts(Message, frozen=True):
    """Hold a `Step` with its nested lists still undecoded."""

    number: int
    released: Released
    grants: Annotated[list[msgspec.Raw], Entries]
    rows: Annotated[list[Row], Entries]
    tokens: bytes
    draws: Annotated[list[msgspec.Raw], Entries] = msgspec.field(default_factory=list)


class _RankStepParts(Message, frozen=True):
    """Hold a `RankStep` with its step still undecoded."""

    step: msgspec.Raw
    hidden: bool
    output: bool


_step = msgspec.msgpack.Decoder(Step)
_rank_step_parts = msgspec.msgpack.Decoder(_RankStepParts)
_step_parts = msgspec.msgpack.Decoder(_StepParts)
_grant = msgspec.msgpack.Decoder(BlockGrant)
_draw = msgspec.msgpack.Decoder(SampleRequest)


def _decode_long_step(payload: bytes | bytearray | memoryview) -> Step:
    """Decode a long step entry by entry, and count blocks and biases on the way.

    A bias of 3 bytes takes 88 in memory, and a frame has room for millions.
    """
    parts = _step_parts.decode(payload)
    grants = _decode_each(parts.grants, _grant, lambda grant: len(grant.blocks), MAX_STEP_BLOCKS)
    draws = _decode_each(parts.draws, _draw, lambda draw: len(draw.logit_bias), MAX_STEP_BIASES)
    return Step(parts.number, parts.released, grants, parts.rows, parts.tokens, draws)


def _decode_rank_step(payload: bytes | bytearray | memoryview) -> RankStep:
    parts = _rank_step_parts.decode(payload)
    is_long = len(payload) > RECORD_BYTES
    step = _decode_long_step(memoryview(parts.step)) if is_long else _step.decode(parts.step)
    if step.draws:
        raise FrameError(f"a RANK_STEP has {len(step.draws)} draws, which are rank 0's")
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


# The fields with text for people, and the number of characters that are kept of each.
_PROSE: dict[type[Message], dict[str, int]] = {
    Hello: {"software": 100, "platform": 200, "device": 200},
    Refuse: {"reason": 500, "hint": 500},
    StepFailed: {"reason": 500},
    BlocksDone: {"error": 500},
    Piece: {"error": 500},
    Prepared: {"error": 500},
    Held: {"error": 500},
    Bye: {"reason": 200},
}


def _made_plain(message: Message) -> Message:
    """Return ``message`` with its text made harmless; see `wire.text`.

    Raises `FrameError` for a name that cannot be printed or is too long.
    """
    prose = _PROSE.get(type(message))
    if prose is not None:
        kept = {name: plain_text(getattr(message, name), limit) for name, limit in prose.items()}
        message = msgspec.structs.replace(message, **kept)
    match message:
        case Hello(dtypes=dtypes, kernels=kernels):
            names = [*dtypes, *kernels]
        case Plan(model=model, model_digest=digest, kernel=kernel, activation_dtype=dtype, stages=stages):
            names = [model, digest, kernel, dtype, *message.kernels]
            names += [name for stage in stages for name in (stage.member, *stage.ranks)]
        case Agree(dtype=dtype):
            names = [dtype] if dtype else []
        case StepFailed(about=about):
            names = [about] if about else []
        case Fetch(wrong=member) | Piece(source=member):
            names = [member] if member else []
        case Prepare(plan=plan):
            _made_plain(plan)
            return message
        case _:
            return message
    for name in names:
        require_plain(name, f"a name in a {type(message).__name__}")
    return message
