"""Limits of an unauthenticated client: it holds little, for a short time, and no place of another client."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.http_limits import HttpLimits
from convoy.api.listen.options import ServeOptions
from support.fake_service import FakeEngine, Running, serving
from support.http_strangers import (
    ENDLESS_VALUE,
    OPENING,
    HalfOpen,
    address_of,
    read_all,
    send_until_refused,
    small_fields,
)
from support.waiting import wait_until

TEXT = "/v1/completions"
KEY = "a-key-of-some-length"


def connect(running: Running) -> socket.socket:
    return socket.create_connection(address_of(running.url), timeout=60)


def get(fields: bytes = b"") -> bytes:
    return b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n"


def test_an_endless_header_value_is_refused(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(ENDLESS_VALUE)
        sent = send_until_refused(sock, iter(lambda: b"x" * 65536, b""), 64 * 1024 * 1024)
        assert sent < 64 * 1024 * 1024


def test_a_header_just_too_long_is_refused_by_name(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(get(b"X-Long: " + b"x" * 33_000 + b"\r\n"))
        answer = read_all(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "header_too_long"
    assert "32768 bytes" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("part_bytes", [700, 100_000])
def test_a_header_of_the_most_bytes_and_fields_is_taken(server: Running, part_bytes: int) -> None:
    fields = b"Connection: close\r\n" + b"".join(b"x-%02d: y\r\n" % i for i in range(97))
    room = 32 * 1024 - len(get(fields + b"X-Long: \r\n"))
    data = get(fields + b"X-Long: " + b"x" * room + b"\r\n")
    assert len(data) == 32 * 1024
    with connect(server) as sock:
        for at in range(0, len(data), part_bytes):
            sock.sendall(data[at : at + part_bytes])
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


def test_many_small_fields_are_refused(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(OPENING + next(small_fields())[:1200] + b"\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 431 ")
    with connect(server) as sock:
        sock.sendall(OPENING)
        assert send_until_refused(sock, small_fields(), 64 * 1024 * 1024) < 64 * 1024 * 1024


def test_a_url_without_end_is_refused(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(b"GET /" + b"x" * 40_000)
        assert read_all(sock).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("more", [b"0\r\nX-Trailer: ", b"1;extension="], ids=["trailer", "extension"])
def test_what_stands_beside_a_chunked_body_is_bounded(server: Running, more: bytes) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(head.encode() + b"1\r\n{\r\n" + more)
        sent = send_until_refused(sock, iter(lambda: b"x" * 65536, b""), 64 * 1024 * 1024)
        assert sent < 64 * 1024 * 1024


def test_many_small_trailers_are_refused(server: Running) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(head.encode() + b"1\r\n{\r\n0\r\n")
        assert send_until_refused(sock, small_fields(), 64 * 1024 * 1024) < 64 * 1024 * 1024


def test_a_long_body_in_small_chunks_is_taken(server: Running) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(200):
            yield b"a"
        # more than a header may have, between two values
        yield b'"' + b" " * 40_000 + b', "max_tokens": 3}'

    answer = httpx.post(
        server.url + TEXT, content=chunks(), headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 200


def test_a_body_that_comes_after_its_refusal_is_cut_off() -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    with serving(options=ServeOptions(port=0, keys=KeyRing.of(KEY))) as running, connect(running) as sock:
        sock.sendall(head.encode())
        sent = send_until_refused(sock, iter(lambda: b"x" * 65536, b""), 64 * 1024 * 1024)
        assert sent < 64 * 1024 * 1024
        assert read_all(sock).startswith(b"HTTP/1.1 401 ")


def test_a_client_with_a_wrong_key_and_a_large_body_reads_the_refusal() -> None:
    with serving(options=ServeOptions(port=0, keys=KeyRing.of(KEY))) as running:
        body, headers = {"prompt": "a" * 4_000_000}, {"authorization": "Bearer wrong"}
        assert httpx.post(running.url + TEXT, json=body, headers=headers, timeout=60).status_code == 401


def test_requests_sent_ahead_are_answered_in_order_and_held_unparsed() -> None:
    with serving() as running, connect(running) as sock:
        sock.sendall(get() * 40 + get(b"Connection: close\r\n"))
        assert read_all(sock).count(b"HTTP/1.1 200 ") == 41


def test_of_requests_sent_ahead_without_end_no_more_are_read() -> None:
    with serving(options=ServeOptions(port=0, heartbeat_s=0.1)) as running:
        running.engine.pause_after = 1
        with connect(running) as sock:
            # The server stops reading, so a send that waits ends the loop.
            sock.settimeout(2)
            body = b'{"prompt": "a", "stream": true}'
            head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            assert running.engine.paused.wait(60)
            sent = send_until_refused(sock, iter(lambda: get() * 1000, b""), 64 * 1024 * 1024)
            assert sent < 64 * 1024 * 1024
        assert running.engine.handles[0].aborted.wait(60)


def test_a_header_that_does_not_come_ends_its_connection() -> None:
    limits = HttpLimits(header_timeout_s=0.2)
    with serving(options=ServeOptions(port=0, limits=limits)) as running:
        for said in (b"", OPENING, b"\r\n"):
            with connect(running) as sock:
                sock.sendall(said)
                assert read_all(sock) == b""


def test_a_header_a_byte_at_a_time_has_no_more_time() -> None:
    limits, pause = HttpLimits(header_timeout_s=0.3), threading.Event()

    def slow_bytes() -> Iterator[bytes]:
        while not pause.wait(0.01):
            yield b"G"

    with serving(options=ServeOptions(port=0, limits=limits)) as running, connect(running) as sock:
        assert send_until_refused(sock, slow_bytes(), 6000) < 6000


class HandClock:
    """Stand still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def read_all(self, sock: socket.socket) -> bytes:
        """Return what comes until the server closes, while an hour passes every few milliseconds."""
        sock.settimeout(0.01)
        answer = b""
        for _ in range(6000):
            try:
                part = sock.recv(65536)
            except TimeoutError:
                self.now_s += 3600.0
                continue
            if not part:
                return answer
            answer += part
        raise AssertionError("the connection is still open")


def test_a_second_header_on_a_connection_has_a_deadline_too() -> None:
    clock = HandClock()
    limits = HttpLimits(clock=clock)
    with serving(options=ServeOptions(port=0, limits=limits)) as running, connect(running) as sock:
        sock.sendall(get() + OPENING)
        first = sock.recv(65536)
        assert (first + clock.read_all(sock)).count(b"HTTP/1.1 ") == 1


def test_an_answer_under_way_has_no_header_deadline() -> None:
    clock = HandClock()
    limits = HttpLimits(clock=clock)
    with serving(options=ServeOptions(port=0, limits=limits)) as running:
        running.engine.pause_after = 1
        with httpx.stream(
            "POST", running.url + TEXT, json={"prompt": "a", "stream": True}, timeout=60
        ) as answer:
            with connect(running) as other:
                # Opened later, and its time is over.
                assert clock.read_all(other) == b""
            running.engine.go.set()
            assert list(answer.iter_lines())[-2] == "data: [DONE]"


def test_half_open_requests_give_way_and_streams_do_not() -> None:
    limits = HttpLimits(max_unproven=8, max_unproven_per_address=8, header_timeout_s=600)
    with serving(FakeEngine(), ServeOptions(port=0, limits=limits)) as running:
        running.engine.pause_after = 1
        with httpx.stream(
            "POST", running.url + TEXT, json={"prompt": "a", "stream": True}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            with HalfOpen(address_of(running.url)) as crowd:
                for _ in range(5):
                    crowd.open(40)
                    assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
                wait_until(lambda: crowd.num_open() <= 8)
            running.engine.go.set()
            assert "data: [DONE]" in list(lines)


def test_more_requests_than_may_be_answered_are_told_to_come_again() -> None:
    limits = HttpLimits(max_kept=1)
    with serving(FakeEngine(), ServeOptions(port=0, limits=limits)) as running:
        running.engine.pause_after = 1
        with httpx.stream(
            "POST", running.url + TEXT, json={"prompt": "a", "stream": True}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            refused = httpx.post(running.url + TEXT, json={"prompt": "a"}, timeout=60)
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
            assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
            running.engine.go.set()
            assert "data: [DONE]" in list(lines)


def test_what_is_no_http_is_refused_and_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), serving() as running:
        for _ in range(60):
            with connect(running) as sock:
                sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
                answer = read_all(sock)
                assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"not_http"' in answer
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 < len(lines) < 40


def test_upgrades_that_are_not_served_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    upgrade = get(b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
    with caplog.at_level(logging.WARNING), serving() as running:
        for _ in range(60):
            with connect(running) as sock:
                sock.sendall(upgrade)
                sock.recv(1000)
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) < 60
