"""Frames between the engine's process and its front process: bounded, closed, and quoted by no error."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from convoy.api.front.channel import FrontChannel
from convoy.errors import FrameError, FrameTooLong
from convoy.wire.front import (
    LENGTH,
    MAX_EVENTS,
    MAX_FRAME_BYTES,
    Ask,
    Drain,
    FrontReady,
    OwnKey,
    TokenEvent,
    decode_from_engine,
    decode_from_front,
    encode_front,
)


@pytest.fixture
def ends() -> Iterator[tuple[FrontChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = FrontChannel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_a_message_arrives_as_it_was_sent(ends: tuple[FrontChannel, socket.socket]) -> None:
    channel, other = ends
    far = FrontChannel(other)
    for message in (Ask(7, "health"), FrontReady()):
        channel.send(message)
        payload = far.receive()
        assert payload is not None
        assert decode_from_front(payload) == message


def test_a_length_over_the_limit_is_refused_before_its_bytes_come(
    ends: tuple[FrontChannel, socket.socket],
) -> None:
    channel, other = ends
    other.sendall(LENGTH.pack(MAX_FRAME_BYTES + 1))
    with pytest.raises(FrameTooLong, match=f"{MAX_FRAME_BYTES + 1} bytes.*{MAX_FRAME_BYTES}"):
        channel.receive()


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(FrameTooLong):
        encode_front(OwnKey("provider", "x" * MAX_FRAME_BYTES))


def test_the_end_of_the_other_process_is_none_between_messages_and_an_error_within_one(
    ends: tuple[FrontChannel, socket.socket],
) -> None:
    channel, other = ends
    other.sendall(encode_front(Drain()) + LENGTH.pack(100) + b"half")
    other.close()
    assert bytes(channel.receive() or b"") == encode_front(Drain())[LENGTH.size :]
    with pytest.raises(FrameError, match="within a message of 100 bytes"):
        channel.receive()
    assert channel.receive() is None


def test_a_process_that_reads_nothing_ends_the_channel_and_holds_no_sender_up() -> None:
    ours, theirs = socket.socketpair()
    channel = FrontChannel(ours, max_send_s=0.05)
    with theirs:
        with pytest.raises(TimeoutError, match="reads nothing"):
            channel.send(OwnKey("provider", "x" * (1 << 22)))
        assert channel.receive() is None
    channel.close()


def test_a_message_may_be_awaited_for_longer_than_a_send() -> None:
    ours, theirs = socket.socketpair()
    channel, late = FrontChannel(ours, max_send_s=0.01), threading.Timer(0.1, theirs.close)
    late.start()
    assert channel.receive() is None
    late.join()
    channel.close()


@pytest.mark.parametrize(
    "value",
    [
        b"\xc1",
        msgspec.msgpack.encode(["secret"]),
        msgspec.msgpack.encode(["ask", 1, "secret"]),
        msgspec.msgpack.encode(["ask", -1, "health"]),
        msgspec.msgpack.encode(["ask", 1, "health", "secret"]),
        msgspec.msgpack.encode(["outputs", [[1, 1, 0, 5, "secret", None]] * (MAX_EVENTS + 1)]),
    ],
)
def test_what_is_no_message_is_refused_and_not_quoted(value: bytes) -> None:
    for decode in (decode_from_front, decode_from_engine):
        with pytest.raises(FrameError, match=f"^{len(value)} bytes of the .* process are no message$"):
            decode(value)


def test_a_message_of_one_side_is_none_of_the_other() -> None:
    drain, ready = (encode_front(one)[LENGTH.size :] for one in (Drain(), FrontReady()))
    with pytest.raises(FrameError):
        decode_from_front(drain)
    with pytest.raises(FrameError):
        decode_from_engine(ready)


def test_an_event_of_a_token_takes_few_bytes() -> None:
    assert len(msgspec.msgpack.encode(TokenEvent(123456, 0, 98765, " text"))) < 32
