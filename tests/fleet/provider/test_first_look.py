"""What a provider does if another server answers at the URL of its coordinator."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from convoy.api.service import Service
from convoy.errors import ConfigError
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.provider.first_look import check_coordinator
from convoy.fleet.provider.provide import ProvideOptions
from convoy.fleet.proxy.trust import Trust
from support.fake_service import serving_of
from support.fleet import FakeEngine, FleetUnderTest, engine_server
from support.proxy import proxy

# A look that has no bound ends here, and fails its test.
GUARD_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
Writes = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(writes: Writes) -> AsyncIterator[str]:
    """Serve each connection with ``writes``, and yield the URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await writes(writer)
        except ConnectionError:
            # The client has read enough.
            return
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def look(url: str, look_s: float = GUARD_S) -> list[str]:
    """Look at ``url``, and return the warnings."""
    told: list[str] = []
    asyncio.run(check_coordinator(ProvideOptions(url.replace("http", "ws", 1), {}), told.append, look_s))
    return told


def look_at(writes: Writes, look_s: float = GUARD_S) -> list[str]:
    """Look at a server that answers with ``writes``, and return the warnings."""

    async def check() -> list[str]:
        told: list[str] = []
        async with asyncio.timeout(GUARD_S), answering(writes) as url:
            await check_coordinator(ProvideOptions(url, {}), told.append, look_s)
        return [line.replace(url, "URL") for line in told]

    return asyncio.run(check())


def sending(body: bytes, head: bytes = HEAD) -> Writes:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(head + body)
        await writer.drain()

    return write


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def never_end(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    while True:
        writer.write(b" " * 65536)
        await writer.drain()


def test_a_head_in_the_place_of_a_coordinator_is_named_with_what_to_do() -> None:
    service = Service((), lambda: (False, "a stage was lost"), dict, level=lambda: "none")
    with serving_of(service) as (url, _), pytest.raises(ConfigError) as caught:
        look(f"{url}/")
    place = url.replace("http", "ws", 1)
    assert caught.value.message == f"a head of Convoy answers at {place}/, expected a coordinator"
    assert "`convoy coordinator` prints its url" in (caught.value.hint or "")
    assert "--upstream" in (caught.value.hint or "")


def test_a_coordinator_says_that_it_is_one(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    try:
        with fleet.client() as client:
            assert client.get("/health").json()["server"] == "coordinator"
            look(str(client.base_url))
    finally:
        fleet.close()


def test_a_server_that_may_stand_before_a_coordinator_or_be_away_is_no_error() -> None:
    with engine_server(FakeEngine()) as url:
        look(url)
    look(url)


def test_a_server_that_drips_is_left_when_the_time_is_over() -> None:
    assert look_at(drip, look_s=0.05) == []


def test_a_body_without_end_is_read_only_at_its_beginning() -> None:
    assert look_at(never_end, look_s=2 * GUARD_S) == []


@pytest.mark.parametrize("body", [b"[" * 4096, b"{", b"3", b"\xff", b'{"status": 1}'])
def test_an_answer_that_cannot_be_read_tells_nothing(body: bytes) -> None:
    assert look_at(sending(body)) == []


def test_a_compressed_body_is_not_unpacked() -> None:
    packed = gzip.compress(b'{"status": "ready", "reason": "", "server": "head"}')
    head = HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    assert look_at(sending(packed, head)) == []


@pytest.mark.parametrize(
    "url", ["ws://127.0.0.1:99999", "wss://host:abc", f"ws://{'a' * 64}.example", "ws://xn--a.example"]
)
def test_a_place_that_cannot_be_asked_tells_nothing(url: str) -> None:
    assert look(url) == []


@pytest.mark.parametrize("server", [b"", b', "server": "gateway"', b', "server": ["head"]'])
def test_a_server_of_another_kind_is_dialled_after_one_warning(server: bytes) -> None:
    body = b'{"status": "ready", "reason": ""%s}' % server
    assert look_at(sending(body)) == [
        "the server at URL does not say that it is a coordinator; it is dialled"
    ]


def test_a_proxy_is_named_without_the_user_of_the_url() -> None:
    with proxy("http://127.0.0.1:1", "sk-test", Trust(frozenset({bytes(32)}))) as url:
        with pytest.raises(ConfigError) as caught:
            look(url.replace("http://", "ws://ann:secret@"))
        place = url.replace("http", "ws", 1)
        assert caught.value.message == f"a proxy of Convoy answers at {place}, expected a coordinator"
