"""The relay of `convoy bench spec` is a longer wire, and not a narrower one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from convoy.bench.hop.delay import DelayRelay


@contextmanager
def wire(delay_s: float) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the two ends of a connection through a relay."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        relay = DelayRelay(listening.getsockname()[:2], delay_s)
        with socket.create_connection(relay.address) as near:
            far, _ = listening.accept()
            with far:
                near.settimeout(20)
                far.settimeout(20)
                yield near, far
        relay.close()


def read(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes and (piece := sock.recv(num_bytes - len(data))):
        data += piece
    return bytes(data)


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_every_byte_comes_late_both_ways_and_none_is_changed(delay_s: float) -> None:
    with wire(delay_s) as (near, far):
        for source, sink in ((near, far), (far, near)):
            for text in (b"one", b"two"):
                sent_s = time.monotonic()
                source.sendall(text)
                assert read(sink, 3) == text
                assert time.monotonic() - sent_s >= delay_s


def test_a_delay_does_not_narrow_the_wire() -> None:
    data = bytes(range(256)) * (1 << 15)  # 8 MiB, in more pieces than fit into one delay one by one
    with wire(0.1) as (near, far):
        sender = threading.Thread(target=near.sendall, args=(data,))
        sent_s = time.monotonic()
        sender.start()
        assert read(far, len(data)) == data
        took_s = time.monotonic() - sent_s
        sender.join()
    assert took_s >= 0.1
    num_pieces = len(data) // (1 << 18)
    assert took_s < 0.1 * num_pieces, "pieces wait together, not one after the other"


def test_an_end_is_passed_on_after_what_came_before_it() -> None:
    with wire(0.02) as (near, far):
        near.sendall(b"last words")
        near.shutdown(socket.SHUT_WR)
        assert read(far, 100) == b"last words"
        far.sendall(b"heard")  # the other way is still open
        assert read(near, 5) == b"heard"


def test_closing_the_relay_ends_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        relay = DelayRelay(listening.getsockname()[:2], 0.01)
        with socket.create_connection(relay.address) as near, listening.accept()[0] as far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            relay.close()
            relay.close()
            assert near.recv(1) == b""
            assert far.recv(1) == b""
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(relay.address)
