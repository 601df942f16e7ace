"""The coordinator's listener in a crowd: providers that registered stay, and consumers are answered."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from convoy.fleet.consumer_request import ConsumerRequest, read_consumer_request
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.requests import consume
from support.fleet import FakeEngine, FleetUnderTest, engine_server, question
from support.http_strangers import OPENING, PROVIDER, HalfOpen, address_of, read_all, send_until_refused


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path, CoordinatorOptions())
    with engine_server(FakeEngine()) as url:
        made.add("one", url)
        yield made
        made.close()


@pytest.mark.parametrize(
    "said", [OPENING, PROVIDER + b"\r\n"], ids=["half a request", "a provider's greeting"]
)
def test_a_crowd_puts_no_provider_out_and_locks_no_consumer_out(fleet: FleetUnderTest, said: bytes) -> None:
    with HalfOpen(address_of(fleet.url), said) as crowd, fleet.client() as client:
        crowd.open(700)
        assert client.post("/v1/chat/completions", json=question(1, 2)).status_code == 200
    assert fleet.events == ["one: registered as one"]


@pytest.mark.parametrize("opening", [OPENING, PROVIDER], ids=["consumer", "provider"])
def test_a_header_without_end_is_refused(fleet: FleetUnderTest, opening: bytes) -> None:
    with socket.create_connection(address_of(fleet.url), timeout=60) as sock:
        sock.sendall(opening + b"X-Endless: ")
        assert send_until_refused(sock, iter(lambda: b"x" * 65536, b""), 64 << 20) < 64 << 20
    with socket.create_connection(address_of(fleet.admin_url), timeout=60) as sock:
        sock.sendall(OPENING + b"X-Long: " + b"x" * 40_000)
        assert read_all(sock).startswith(b"HTTP/1.1 431 ")


def test_slashes_too_many_find_their_path(fleet: FleetUnderTest) -> None:
    with fleet.client() as client:
        assert client.get(f"{fleet.url}//v1/models/").status_code == 200
        assert client.post(f"{fleet.url}//v1//chat/completions", json=question(1, 2)).status_code == 200


def test_a_long_body_is_read_beside_other_requests(
    fleet: FleetUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()

    def read(data: bytes, *arguments: Any, **named: Any) -> ConsumerRequest:
        if len(data) > 100_000:
            began.set()
            assert go.wait(60.0)
        return read_consumer_request(data, *arguments, **named)

    monkeypatch.setattr(consume, "read_consumer_request", read)
    long = json.dumps({**question(1, 2), "note": "x" * 300_000})
    with fleet.client() as client, ThreadPoolExecutor(1) as others:
        try:
            asked = others.submit(client.post, "/v1/chat/completions", content=long)
            assert began.wait(60.0)
            assert client.get("/health").status_code == 200
            assert client.post("/v1/chat/completions", json=question(1, 2)).status_code == 200
            assert not asked.done()
        finally:
            go.set()
        assert asked.result().status_code in {200, 400}
