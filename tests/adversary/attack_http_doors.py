"""What a client without a key can do to an HTTP listener: nothing that lasts, nothing to others' streams."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from adversary.beside import others_beside, rate_beside
from adversary.ledger import Row
from convoy.cli.flags.metrics import serving_metrics
from convoy.cluster.metrics.families import gauge
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.proxy.trust import Trust
from convoy.transport.ports import free_port
from support.fleet import FakeEngine, FleetUnderTest, engine_server, question
from support.head_processes import head_rss_bytes
from support.http_strangers import (
    ENDLESS_VALUE,
    OPENING,
    PROVIDER,
    HalfOpen,
    address_of,
    read_all,
    send_until_refused,
    small_fields,
)
from support.programs import Program
from support.proxy import proxy

NUM_HALF_OPEN = 10_000
NUM_DESCRIPTORS = 1024
MAX_GROWTH_BYTES = 16 << 20
MAX_SENT_BYTES = 64 << 20
START_S = 240.0
SCRAPE_KEY = "the-key-of-prometheus"
LAYER = "HTTP"


class Head:
    """Run a real ``convoy serve`` that may have 1,024 descriptors and no more."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        limited = ["/bin/sh", "-c", f'ulimit -n {NUM_DESCRIPTORS}; exec "$@"', "sh"]
        self.log = folder / "head.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*limited, sys.executable, "-m", "convoy", "serve", "demo-mini", "--port", port],
                cwd=folder,
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        end_s = time.monotonic() + START_S
        while not self.is_ready():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < end_s, self.log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        # What a first answer takes for good is no growth by an attack.
        body = {"prompt": "a", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).status_code == 200

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    def rss_bytes(self) -> int:
        return head_rss_bytes(self.process.pid)

    def connect(self) -> socket.socket:
        return socket.create_connection(address_of(self.url), timeout=60)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    started = Head(tmp_path_factory.mktemp("head"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path_factory.mktemp("fleet"), CoordinatorOptions())
    with engine_server(FakeEngine()) as url:
        made.add("one", url)
        yield made
        made.close()


def check_growth(num_bytes: int, row: Row) -> None:
    row.outcomes[f"{num_bytes / 2**20:.0f} MiB more"] += 1
    assert num_bytes < MAX_GROWTH_BYTES


# Made once: the attacker's work must not slow the streams of this process.
_FIELDS = next(small_fields())


def parts_of(kind: str) -> Iterator[bytes]:
    part = b"x" * 65536 if kind == "value" else _FIELDS
    return iter(lambda: part, b"")


@pytest.mark.attack("a header without end, at a head", layer=LAYER)
@pytest.mark.parametrize("kind", ["value", "fields"])
def test_a_header_without_end_costs_a_head_little_and_a_stream_nothing(
    head: Head, row: Row, kind: str
) -> None:
    before = head.rss_bytes()

    def flood() -> None:
        with head.connect() as sock:
            sock.sendall(ENDLESS_VALUE if kind == "value" else OPENING)
            assert send_until_refused(sock, parts_of(kind), MAX_SENT_BYTES) < MAX_SENT_BYTES
        row.tried("431 and closed")

    with others_beside(head.url, row):
        for _ in range(20):
            flood()
    rate_beside(head.url, row, flood)
    check_growth(head.rss_bytes() - before, row)


@pytest.mark.attack("a header without end, at a coordinator of its own process", layer=LAYER)
def test_a_header_without_end_costs_a_coordinator_little_memory(tmp_path: Path, row: Row) -> None:
    flags = ("--dir", "fleet", "--port", "0", "--admin-port", "0", "--json")
    program = Program(tmp_path, "coordinator", "coordinator", *flags)
    try:
        url = program.ready()["url"]
        process = psutil.Process(program.process.pid)
        assert httpx.get(f"{url}/health", timeout=60).status_code in {200, 503}
        before = process.memory_info().rss
        for opening in (ENDLESS_VALUE, OPENING, PROVIDER + b"X-Endless: ", PROVIDER):
            for _ in range(20):
                with socket.create_connection(address_of(url), timeout=60) as sock:
                    sock.sendall(opening)
                    parts = parts_of("value" if opening.endswith(b"X-Endless: ") else "fields")
                    assert send_until_refused(sock, parts, MAX_SENT_BYTES) < MAX_SENT_BYTES
                row.tried("431 and closed")
        check_growth(process.memory_info().rss - before, row)
        assert httpx.get(f"{url}/health", timeout=60).status_code in {200, 503}
    finally:
        program.stop()


@pytest.mark.attack("a header without end, at a coordinator", layer=LAYER)
@pytest.mark.parametrize("opening", [ENDLESS_VALUE, PROVIDER + b"X-Endless: "], ids=["consumer", "provider"])
@pytest.mark.parametrize("kind", ["value", "fields"])
def test_a_header_without_end_is_refused_by_a_coordinator(
    fleet: FleetUnderTest, row: Row, opening: bytes, kind: str
) -> None:
    with socket.create_connection(address_of(fleet.url), timeout=60) as sock:
        sock.sendall(opening)
        assert send_until_refused(sock, parts_of(kind), MAX_SENT_BYTES) < MAX_SENT_BYTES
    row.tried("431 and closed")
    with fleet.client() as client:
        assert client.post("/v1/chat/completions", json=question(1, 2)).status_code == 200


@pytest.mark.attack("10,000 half-open requests, at a head with 1,024 descriptors", layer=LAYER)
def test_half_open_requests_lock_nobody_out_of_a_head(head: Head, row: Row) -> None:
    before = head.rss_bytes()
    with HalfOpen(address_of(head.url)) as crowd, others_beside(head.url, row):
        for _ in range(20):
            crowd.open(NUM_HALF_OPEN // 20, hold=5000)
            row.tried("given way to newer ones")
        # Connections are accepted in their order: this answer comes after all others had a place.
        assert head.is_ready()
        assert crowd.num_open() < NUM_DESCRIPTORS
    check_growth(head.rss_bytes() - before, row)


@pytest.mark.attack("half-open requests, at a coordinator", layer=LAYER)
def test_half_open_requests_lock_no_consumer_and_no_provider_out_of_a_coordinator(
    fleet: FleetUnderTest, row: Row
) -> None:
    with HalfOpen(address_of(fleet.url)) as crowd:
        for _ in range(4):
            crowd.open(500)
            # A connection that waits for its next request gives way too, so each request has its own.
            with fleet.client() as client:
                assert client.post("/v1/chat/completions", json=question(1, 2)).status_code == 200
            row.tried("answered by the provider that was there before")


@pytest.mark.attack("half-open requests, at a proxy", layer=LAYER)
def test_half_open_requests_lock_no_tool_out_of_a_proxy(fleet: FleetUnderTest, row: Row) -> None:
    trust = Trust(frozenset(fleet.identities))
    with proxy(fleet.url, fleet.key, trust) as url, HalfOpen(address_of(url)) as crowd:
        for _ in range(4):
            crowd.open(500)
            answer = httpx.post(
                f"{url}/v1/chat/completions", json=question(1, 2), timeout=60, trust_env=False
            )
            assert answer.status_code == 200
            row.tried("answered by the provider that was there before")
        with socket.create_connection(address_of(url), timeout=60) as sock:
            sock.sendall(ENDLESS_VALUE)
            assert send_until_refused(sock, parts_of("value"), MAX_SENT_BYTES) < MAX_SENT_BYTES
        row.tried("431 and closed")


@pytest.mark.attack("half-open scrapes, and scrapes without the key", layer=LAYER)
def test_half_open_requests_lock_no_scraper_out_and_a_scrape_without_the_key_reads_nothing(
    tmp_path: Path, row: Row
) -> None:
    file = tmp_path / "scrape.key"
    file.touch(mode=0o600)
    file.write_text(SCRAPE_KEY + "\n")
    said: list[str] = []
    source = lambda: [gauge("convoy_up", "It runs.", [({}, 1.0)])]  # noqa: E731
    with serving_metrics("127.0.0.1:0", file, source, lambda _, url: said.append(url)):
        (url,) = said
        with HalfOpen(address_of(url)) as crowd:
            for _ in range(4):
                crowd.open(250)
                found = httpx.get(url, headers={"x-api-key": SCRAPE_KEY}, timeout=60, trust_env=False)
                assert found.status_code == 200
                row.tried("scraped with the key")
                refused = httpx.get(url, headers={"x-api-key": "wrong"}, timeout=60, trust_env=False)
                assert (refused.status_code, refused.content) == (401, b"")
                row.tried("401")


@pytest.mark.attack("lines of log by strangers", layer=LAYER)
def test_what_is_no_http_fills_no_log(head: Head, row: Row) -> None:
    before = head.log.stat().st_size
    for _ in range(300):
        with head.connect() as sock:
            sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 400 ")
        row.tried("400, logged at a bounded rate")
    assert head.log.stat().st_size - before < 300 * 60
