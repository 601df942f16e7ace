"""A proxy's listener in a crowd: its tools are answered, and headers without end are refused."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import httpx

from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.proxy.trust import Trust
from support.fleet import FakeEngine, FleetUnderTest, engine_server, question
from support.http_strangers import ENDLESS_VALUE, HalfOpen, address_of, send_until_refused
from support.proxy import proxy


def test_a_crowd_before_a_proxy_locks_no_tool_out(tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleet = FleetUnderTest(tmp_path, CoordinatorOptions())
        stack.callback(fleet.close)
        fleet.add("one", stack.enter_context(engine_server(FakeEngine())))
        url = stack.enter_context(proxy(fleet.url, fleet.key, Trust(frozenset(fleet.identities))))
        crowd = stack.enter_context(HalfOpen(address_of(url)))
        crowd.open(600)
        for path in ("/v1/chat/completions", "//v1/chat/completions/"):
            answer = httpx.post(url + path, json=question(1, 2), timeout=60, trust_env=False)
            assert answer.status_code == 200
        with socket.create_connection(address_of(url), timeout=60) as sock:
            sock.sendall(ENDLESS_VALUE)
            assert send_until_refused(sock, iter(lambda: b"x" * 65536, b""), 64 << 20) < 64 << 20
