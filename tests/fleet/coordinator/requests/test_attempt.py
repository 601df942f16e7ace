"""Try one provider with all its messages queued before they are read, so that no test waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import msgspec
import pytest

from convoy.crypto.sealed.answer import AnswerSealer
from convoy.crypto.sealed.request import RequestFacts, RequestKey, request_hash
from convoy.errors import ProviderError
from convoy.fleet.capacity import Capacity
from convoy.fleet.consumer_request import ConsumerRequest, read_consumer_request
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.providers.answering import Answering, AnswerMessage, ProviderFailed
from convoy.fleet.coordinator.providers.connection import ProviderSocket, Registration
from convoy.fleet.coordinator.requests.attempt import Attempt, OwnSeal
from convoy.fleet.timing import Timing
from convoy.wire.fleet.messages import Began, Chunk, Done, Serve

KEY = RequestKey()
HEAD = b'{"status":200,"content_type":"text/event-stream"}'
OPTIONS = CoordinatorOptions(first_token_s=1.0, whole_s=9.0)


def registered(prefill_rate: float = 100.0) -> Registration:
    offers = {"m": Capacity(1, 1.0, 1.0, prefill_rate, 4096)}
    return Registration(bytes(32), "me", KEY.public, 1 << 40, bytes(64), b"", None, "raw", offers)


def sealer_of(serve: Serve) -> AnswerSealer:
    facts = RequestFacts(
        provider="me",
        key_id=serve.key_id,
        model=serve.model,
        request_id=serve.request_id,
        lease=serve.lease,
        expires_s=serve.expires_s,
        max_tokens=serve.max_tokens,
        kind=serve.kind,
    )
    return AnswerSealer(KEY.open(facts, serve.sealed).answer_secret, request_hash(facts, serve.sealed))


class Socket:
    """Answer with ``pieces``, each with how many tokens were given so far."""

    def __init__(self, pieces: list[tuple[bytes, int]], registration: Registration) -> None:
        self.registration = registration
        self._pieces = pieces

    async def ask(self, serve: Serve) -> Answering:
        sealer = sealer_of(serve)
        answer = Answering(serve.request_id, 100, lambda _: None)
        answer.put(Began(serve.request_id, sealer.nonce))
        tokens = 0
        for piece, tokens in self._pieces:
            answer.put(Chunk(serve.request_id, sealer.seal(piece), tokens, False))
        answer.put(Chunk(serve.request_id, sealer.seal(b"{}", last=True), tokens, True))
        answer.put(Done(serve.request_id, 1, 1))
        return answer


class Alive(Answering):
    """Begin, and then give one sign of life after the other for ever."""

    def __init__(self, request_id: str, sealer: AnswerSealer) -> None:
        super().__init__(request_id, 4, lambda _: None)
        self._sealer = sealer
        self._has_begun = False

    async def get(self, timeout_s: float) -> AnswerMessage:
        await asyncio.sleep(0)
        if not self._has_begun:
            self._has_begun = True
            return Began(self.request_id, self._sealer.nonce)
        return Chunk(self.request_id, self._sealer.seal(b""), 0, False)


class AliveSocket(Socket):
    """Send signs of life for ever, in place of a first token."""

    async def ask(self, serve: Serve) -> Answering:
        return Alive(serve.request_id, sealer_of(serve))


def wanted(prompt: str = "x", stream: bool = True) -> ConsumerRequest:
    body = {
        "model": "m",
        "stream": stream,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": prompt}],
    }
    return read_consumer_request(msgspec.json.encode(body), "chat", "", {})


def whole(pieces: list[tuple[bytes, int]], **limits: int) -> bytes:
    async def run() -> bytes:
        socket = cast(ProviderSocket, Socket(pieces, registered()))
        attempt = Attempt(socket, OwnSeal(wanted()), "r1", OPTIONS, **limits)
        await attempt.send(Timing())
        await attempt.head(Timing())
        return await attempt.whole()

    return asyncio.run(run())


def test_signs_of_life_may_come_before_the_head_and_are_no_part_of_the_answer() -> None:
    assert whole([(b"", 0), (b"", 0), (HEAD, 0), (b"", 0), (b"text", 1)]) == b"text"


def test_what_comes_before_a_first_token_and_a_whole_answer_have_bounds() -> None:
    limits = {"max_early_bytes": 10, "max_whole_bytes": 12}
    assert whole([(HEAD, 0), (b"x" * 10, 0), (b"yz", 1)], **limits) == b"x" * 10 + b"yz"
    with pytest.raises(ProviderFailed, match="before a first token"):
        whole([(HEAD, 0), (b"x" * 6, 0), (b"x" * 6, 0), (b"y", 0)], **limits)
    with pytest.raises(ProviderFailed, match="more than 12 bytes"):
        whole([(HEAD, 0), (b"x" * 10, 1), (b"yyy", 1)], **limits)


@pytest.mark.parametrize("kind", ["a\\r\\nb: c", "x" * 201, "t\\u00e9xt"])
def test_a_content_type_that_no_header_may_have_is_refused_before_anything_is_charged(kind: str) -> None:
    with pytest.raises(ProviderError, match="content type"):
        whole([(b'{"status":200,"content_type":"' + kind.encode() + b'"}', 0), (b"y", 1)])


def test_a_long_prompt_and_a_whole_answer_have_the_time_that_they_take() -> None:
    def waits(asked: ConsumerRequest, prefill_rate: float) -> tuple[float, float]:
        async def run() -> tuple[float, float]:
            socket = cast(ProviderSocket, Socket([], registered(prefill_rate)))
            attempt = Attempt(socket, OwnSeal(asked), "r1", OPTIONS)
            await attempt.send(Timing())
            return attempt.max_silence_s, attempt.max_first_s

        return asyncio.run(run())

    long = wanted("x" * 1000)
    read_s = long.most_prompt_tokens / 100.0
    assert waits(long, 100.0) == pytest.approx((1.0 + read_s, 1.0 + read_s))
    assert waits(wanted("x" * 1000, stream=False), 100.0)[1] == pytest.approx(10.0 + read_s, rel=0.01)
    assert waits(long, 1e-3)[0] <= 601.0  # whatever it offered


def test_signs_of_life_do_not_put_off_a_first_token_for_ever() -> None:
    async def run() -> None:
        socket = cast(ProviderSocket, AliveSocket([], registered(1e9)))
        options = replace(OPTIONS, first_token_s=0.05)
        attempt = Attempt(socket, OwnSeal(wanted()), "r1", options)
        await attempt.send(Timing())
        await attempt.head(Timing())

    with pytest.raises(ProviderFailed, match=r"no token for 0\.05"):
        asyncio.run(run())
