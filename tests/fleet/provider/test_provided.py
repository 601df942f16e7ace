from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from convoy.crypto.sealed.request import RequestFacts, RequestKey, seal_request
from convoy.errors import ConvoyError, ProviderError, SealError
from convoy.fleet.consumer_request import read_consumer_request
from convoy.fleet.provider import provided as provided_module
from convoy.fleet.provider.provided import Provided, SeenRequests, Send
from convoy.fleet.provider.upstream import Upstream, UpstreamAnswer
from convoy.wire.fleet.messages import Began, Chunk, Done, Failed, FleetMessage, Kind, Serve

KEY = RequestKey()
BODY = b'{"model":"m","messages":[],"max_tokens":8}'


async def nobody(_: FleetMessage) -> None:
    raise AssertionError("nothing is sent")


def sealed(body: bytes = BODY, provider: str = "me", max_tokens: int = 8) -> Serve:
    facts = RequestFacts(
        provider=provider,
        key_id=KEY.key_id,
        model="m",
        request_id="r1",
        lease=b"",
        expires_s=int(time.time()) + 60,
        max_tokens=max_tokens,
        kind="chat",
    )
    data, _ = seal_request(KEY.public, facts, body)
    return Serve(
        request_id=facts.request_id,
        key_id=facts.key_id,
        model=facts.model,
        lease=facts.lease,
        expires_s=facts.expires_s,
        max_tokens=facts.max_tokens,
        kind="chat",
        sealed=data,
    )


def open_it(serve: Serve, seen: SeenRequests | None = None) -> bytes:
    wanted, _ = asyncio.run(Provided(serve, nobody, 4).open(KEY, "me", seen or SeenRequests()))
    return wanted.body


def test_a_request_that_is_sealed_for_here_opens() -> None:
    assert msgspec.json.decode(open_it(sealed()))["max_tokens"] == 8


def test_a_sealed_request_opens_once() -> None:
    seen, serve = SeenRequests(), sealed()
    open_it(serve, seen)
    with pytest.raises(ProviderError, match="came twice"):
        open_it(serve, seen)


def test_a_body_for_another_provider_does_not_open() -> None:
    with pytest.raises(SealError):
        open_it(sealed(provider="somebody else"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"max_tokens": 9},
        {"request_id": "r2"},
        {"lease": b"x"},
        {"kind": "completion"},
        {"expires_s": 1 << 39},
        {"key_id": bytes(16)},
    ],
)
def test_what_is_said_beside_a_body_cannot_be_changed(changes: dict[str, object]) -> None:
    with pytest.raises(SealError):
        open_it(msgspec.structs.replace(sealed(), **changes))


def test_a_body_that_asks_for_more_than_is_said_beside_it_is_refused() -> None:
    with pytest.raises(ProviderError, match="do not match the body"):
        open_it(sealed(b'{"model":"m","messages":[],"max_tokens":8,"n":2}'))
    with pytest.raises(ProviderError, match="do not match the body"):
        open_it(sealed(b'{"model":"other","messages":[],"max_tokens":8}'))
    with pytest.raises(ProviderError, match="no request"):
        open_it(sealed(b"secret"))


def test_a_forged_request_uses_nobodys_id_up() -> None:
    seen, serve = SeenRequests(), sealed()
    with pytest.raises(ConvoyError):
        open_it(msgspec.structs.replace(serve, sealed=bytes(2000)), seen)
    open_it(serve, seen)


def test_expired_requests_are_refused_and_forgotten() -> None:
    seen = SeenRequests()
    with pytest.raises(ProviderError, match="expired"):
        seen.add("r", 10, 10.0)
    seen.add("r", 11, 10.0)
    with pytest.raises(ProviderError, match="twice"):
        seen.add("r", 30, 10.5)


class OneAnswer(Upstream):
    """Answer with ``pieces``, and not before ``may_answer``."""

    def __init__(self, status: int, pieces: list[bytes], may_answer: asyncio.Event | None = None) -> None:
        super().__init__("http://127.0.0.1:1")
        self._answer, self._may_answer = (status, pieces), may_answer
        self.asked: list[bytes] = []

    @asynccontextmanager
    async def ask(self, kind: Kind, body: bytes, trace: str = "") -> AsyncIterator[UpstreamAnswer]:
        self.asked.append(body)
        if self._may_answer is not None:
            await self._may_answer.wait()
        status, pieces = self._answer

        async def body_of() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        yield UpstreamAnswer(status, "application/json", body_of())


def said(
    engine: OneAnswer,
    body: bytes = BODY,
    hears: Send | None = None,
    *,
    shares_cache: bool = False,
    still_here_s: float = 5.0,
) -> list[FleetMessage]:
    """Return a provider's messages about one request."""
    heard: list[FleetMessage] = []

    async def send(message: FleetMessage) -> None:
        heard.append(message)
        if hears is not None:
            await hears(message)

    async def run() -> None:
        provided = Provided(sealed(body), send, 1000, still_here_s=still_here_s)
        provided.shares_cache = shares_cache
        async with asyncio.timeout(10):
            await provided.run(*await provided.open(KEY, "me", SeenRequests()), engine)
        await engine.close()

    asyncio.run(run())
    return heard


def test_a_provider_says_that_it_is_there_while_its_engine_says_nothing() -> None:
    may_answer, chunks = asyncio.Event(), 0

    async def hears(message: FleetMessage) -> None:
        nonlocal chunks
        chunks += isinstance(message, Chunk)
        if chunks == 3:
            may_answer.set()

    heard = said(
        OneAnswer(200, [b'{"usage":{"completion_tokens":2}}'], may_answer), hears=hears, still_here_s=0.001
    )
    assert isinstance(heard[0], Began)
    assert sum(isinstance(message, Began) for message in heard) == 1
    assert [message.tokens for message in heard if isinstance(message, Chunk)][:3] == [0, 0, 0]
    assert isinstance(heard[-1], Done)


@pytest.mark.parametrize(
    ("status", "full"), [(401, False), (404, False), (500, False), (429, True), (503, True)]
)
def test_an_engine_that_refuses_everybody_is_no_answer(status: int, full: bool) -> None:
    (failed,) = said(OneAnswer(status, [b"{}"]))
    assert isinstance(failed, Failed)
    assert failed.full == full


def test_an_engine_that_gives_more_than_was_asked_for_is_cut_at_what_is_paid() -> None:
    token = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    heard = said(OneAnswer(200, [token] * 200), BODY[:-1] + b',"stream":true}')
    assert (
        sum(isinstance(message, Chunk) for message in heard) == 8 + 1 + 16 + 4
    )  # one over, head, end, counts
    assert isinstance(heard[-1], Done)
    assert heard[-1].completion_tokens == 8


def test_an_engine_gets_the_accounts_salt_unless_its_cache_is_declared_shared() -> None:
    engine = OneAnswer(200, [b"{}"])
    salted = BODY[:-1] + b',"cache_salt":"a"}'
    said(engine, salted)
    said(engine, salted, shares_cache=True)
    assert [msgspec.json.decode(body).get("cache_salt") for body in engine.asked] == ["a", None]


def test_a_long_body_holds_up_no_other_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Event(), threading.Event()

    def read(*arguments: Any) -> Any:
        began.set()
        assert go.wait(60.0)
        return read_consumer_request(*arguments)

    monkeypatch.setattr(provided_module, "read_consumer_request", read)
    body = BODY[:-1] + b', "note": "' + b"x" * 300_000 + b'"}'

    async def scene() -> bytes:
        opening = asyncio.ensure_future(Provided(sealed(body), nobody, 4).open(KEY, "me", SeenRequests()))
        # This loop goes on while the body is read.
        assert await asyncio.to_thread(began.wait, 60.0)
        assert not opening.done()
        go.set()
        wanted, _ = await opening
        return wanted.body

    assert len(asyncio.run(scene())) > 300_000
