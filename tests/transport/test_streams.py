"""One suite for every stream: TLS over TCP and memory must not be told apart by a link."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.errors import LinkBroken
from convoy.testing.streams import (
    Cut,
    Drop,
    FlipBit,
    RecordedStream,
    Reorder,
    Repeat,
    Stall,
    memory_stream_pair,
)
from convoy.transport.streams.stream import Stream, recv_exactly
from convoy.transport.streams.tcp import (
    TlsStream,
    client_context,
    server_context,
    start_tls_client,
    start_tls_server,
)
from support.members import make_local_members

Pair = tuple[Stream, Stream]


def tls_pair(directory: Path) -> Pair:
    alpha, beta = make_local_members(["alpha", "beta"], directory)
    near, far = _tcp_pair()
    deadline_s = time.monotonic() + 10
    server: list[TlsStream] = []

    def serve() -> None:
        server.append(TlsStream(start_tls_server(far, server_context(beta), deadline_s), 60))

    thread = threading.Thread(target=serve)
    thread.start()
    client = TlsStream(start_tls_client(near, client_context(alpha), deadline_s), 60)
    thread.join()
    return client, server[0]


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@pytest.fixture(params=["memory", pytest.param("tls", marks=pytest.mark.outside), "recorded"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    if request.param == "tls":
        ends = tls_pair(tmp_path)
    else:
        ends = memory_stream_pair()
        if request.param == "recorded":
            ends = RecordedStream(ends[0], bytearray()), ends[1]
    for end in ends:
        end.set_deadline(time.monotonic() + 20)
    yield ends
    for end in ends:
        end.close()


def test_bytes_arrive_in_order_whatever_the_sizes(pair: Pair) -> None:
    for piece in (b"a", b"bc", bytearray(b"def"), memoryview(b"ghij")):
        pair[0].send_all(piece)
    assert recv_exactly(pair[1], 10) == b"abcdefghij"


def test_both_directions_carry(pair: Pair) -> None:
    pair[0].send_all(b"ping")
    assert recv_exactly(pair[1], 4) == b"ping"
    pair[1].send_all(b"pong")
    assert recv_exactly(pair[0], 4) == b"pong"


def test_much_more_than_any_buffer_arrives_whole(pair: Pair) -> None:
    data = bytes(range(256)) * 4096 * 8
    sender = threading.Thread(target=pair[0].send_all, args=(data,))
    sender.start()
    assert recv_exactly(pair[1], len(data)) == data
    sender.join()


def test_a_receive_takes_what_is_there_and_no_more(pair: Pair) -> None:
    pair[0].send_all(b"abc")
    buffer = bytearray(100)
    assert pair[1].recv_into(memoryview(buffer)) == 3
    assert buffer[:4] == b"abc\0"


def test_the_end_of_the_other_side_reads_as_zero_bytes(pair: Pair) -> None:
    pair[0].send_all(b"last")
    pair[0].close()
    assert recv_exactly(pair[1], 100) == b"last"


def test_a_send_to_a_closed_end_breaks_and_does_not_hang(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(LinkBroken):  # noqa: PT012 - when the end is noticed is the kernel's business
        for _ in range(1000):
            pair[0].send_all(bytes(65536))


def test_a_send_after_closing_here_is_refused(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(LinkBroken):
        pair[0].send_all(b"late")


def test_closing_wakes_a_receiver_in_another_thread(pair: Pair) -> None:
    outcome: list[object] = []

    def receive() -> None:
        try:
            outcome.append(pair[0].recv_into(memoryview(bytearray(1))))
        except LinkBroken as error:
            outcome.append(error)

    pair[0].set_deadline(None)
    thread = threading.Thread(target=receive)
    thread.start()
    pair[0].close()
    thread.join(10)
    assert not thread.is_alive()
    assert outcome[0] == 0 or isinstance(outcome[0], LinkBroken)


def test_closing_wakes_a_sender_in_another_thread(pair: Pair) -> None:
    outcome: list[object] = []

    def send() -> None:
        try:
            while True:
                pair[0].send_all(bytes(1 << 20))
        except LinkBroken as error:
            outcome.append(error)

    pair[0].set_deadline(None)
    thread = threading.Thread(target=send)
    thread.start()
    pair[0].close()
    thread.join(10)
    assert isinstance(outcome[0], LinkBroken)


def test_a_deadline_ends_a_receive(pair: Pair) -> None:
    pair[1].set_deadline(time.monotonic() + 0.05)
    with pytest.raises(LinkBroken, match="before the deadline"):
        pair[1].recv_into(memoryview(bytearray(1)))


def test_a_deadline_that_has_passed_ends_at_once(pair: Pair) -> None:
    pair[1].set_deadline(time.monotonic() - 1)
    with pytest.raises(LinkBroken, match="before the deadline"):
        pair[1].recv_into(memoryview(bytearray(1)))


def test_a_deadline_is_total_and_not_per_read(pair: Pair) -> None:
    pair[1].set_deadline(time.monotonic() + 0.3)
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            try:
                pair[0].send_all(b"x")
            except LinkBroken:
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(LinkBroken, match="before the deadline"):
        recv_exactly(pair[1], 10_000)
    stop.set()
    thread.join()


def test_a_deadline_ends_a_send_that_nobody_takes(pair: Pair) -> None:
    pair[0].set_deadline(time.monotonic() + 0.2)
    with pytest.raises(LinkBroken, match="before the deadline"):  # noqa: PT012 - buffers fill first
        while True:
            pair[0].send_all(bytes(1 << 20))


def test_closing_twice_is_allowed(pair: Pair) -> None:
    pair[0].close()
    pair[0].close()


def received(*faults: Drop | FlipBit | Cut | Reorder | Repeat) -> bytes:
    near, far = memory_stream_pair(faults)
    try:
        for piece in (b"aa", b"bb", b"cc"):
            near.send_all(piece)
    except LinkBroken:
        pass
    near.close()
    return bytes(recv_exactly(far, 100))


def test_faults_do_what_their_names_say() -> None:
    assert received() == b"aabbcc"
    assert received(Drop(1)) == b"aacc"
    assert received(FlipBit(1, 0)) == b"aacbcc"
    assert received(FlipBit(0, -1)) == b"a\xe1bbcc"
    assert received(Cut(1, 1)) == b"aab"
    assert received(Reorder(0)) == b"bbaacc"
    assert received(Repeat(2)) == b"aabbcccc"


def test_a_stall_holds_until_it_is_released() -> None:
    stall = Stall(1)
    near, far = memory_stream_pair([stall])
    near.send_all(b"aa")
    thread = threading.Thread(target=near.send_all, args=(b"bb",))
    thread.start()
    assert recv_exactly(far, 2) == b"aa"
    stall.release.set()
    assert recv_exactly(far, 2) == b"bb"
    thread.join()
