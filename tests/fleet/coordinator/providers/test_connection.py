"""Providers that lie, stumble or vanish, on a real socket of a real coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from convoy.crypto.identity import Identity
from convoy.crypto.sealed.answer import AnswerSealer
from convoy.crypto.sealed.request import RequestFacts, RequestKey, request_hash
from convoy.errors import ProviderError
from convoy.fleet.books.price import Price
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.providers.answering import Answering
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from convoy.wire.fleet.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    AwaitApproval,
    Began,
    Chunk,
    Done,
    Failed,
    FleetMessage,
    FromCoordinator,
    Heartbeat,
    ModelLoad,
    Offer,
    Proof,
    Prove,
    ProviderChallenge,
    ProviderHello,
    Refused,
    Register,
    Registered,
    Serve,
    decode_from_coordinator,
    encode_fleet,
    proof_bytes,
    registration_bytes,
)
from support.fleet import MODEL, FleetUnderTest, question, streamed
from support.waiting import WAIT_S, wait_until

# No deadline passes here: a machine that is busy must not be taken for a provider that is silent.
OPTIONS = CoordinatorOptions(
    instance="test",
    queue=QueueLimits(50, 50, 60.0),
    window=4,
    greeting_s=60.0,
    approval_s=0.1,
    silence_s=60.0,
    first_token_s=60.0,
    chunk_s=60.0,
    max_attempts=2,
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path_factory.mktemp("fleet"), OPTIONS)
    yield made
    made.close()


class RawProvider:
    """Drive the protocol by hand, and so be able to break it."""

    def __init__(self, fleet: FleetUnderTest) -> None:
        self.fleet = fleet
        self.identity = Identity.generate()
        self.key = RequestKey()
        url = fleet.url.replace("http", "ws", 1) + "/provider"
        self._context = connect(url, max_size=MAX_MESSAGE_BYTES, compression=None)
        self.socket: ClientConnection = self._context.__enter__()
        self.authority = f"127.0.0.1:{fleet.port}"
        self.send(ProviderHello(PROTOCOL, bytes(32), self.authority, tls=False, pinned=False))
        challenge = self.receive()
        assert isinstance(challenge, ProviderChallenge)
        self.challenge = challenge

    def __enter__(self) -> RawProvider:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)

    def receive(self) -> FromCoordinator:
        data = self.socket.recv(timeout=WAIT_S)
        assert isinstance(data, bytes)
        return decode_from_coordinator(data, MAX_MESSAGE_BYTES)

    def send(self, message: FleetMessage) -> None:
        self.socket.send(encode_fleet(message))

    def registration(self, authority: str | None = None, **changes: object) -> Register:
        made = Register(
            identity=self.identity.public_key,
            request_key=self.key.public,
            request_key_expires_s=int(time.time()) + 3600,
            key_signature=bytes(64),
            certificate=b"",
            software="raw",
            offers=[Offer(MODEL, 4, 10.0, 20.0, 100.0, 4096)],
            signature=bytes(64),
        )
        made = msgspec.structs.replace(made, **changes)
        said = registration_bytes(self.challenge, authority or self.authority, made)
        return msgspec.structs.replace(made, signature=self.identity.sign(said))

    def approved(self, name: str) -> RawProvider:
        self.fleet.directory.approve(self.identity.public_key, name)
        self.send(self.registration())
        assert isinstance(self.receive(), Registered)
        return self

    def next_request(self) -> Serve:
        while not isinstance(message := self.receive(), Serve):
            assert isinstance(message, Prove), message
            self.prove(message)
        return message

    def prove(self, message: Prove) -> None:
        said = proof_bytes(self.challenge.coordinator, message.nonce)
        self.send(Proof(message.nonce, self.identity.sign(said)))

    def is_put_out(self) -> bool:
        """Return whether the coordinator ends the socket, whatever else it says first."""
        try:
            while True:
                self.socket.recv(timeout=WAIT_S)
        except ConnectionClosed:
            return True


def refusal(raw: RawProvider, message: FleetMessage) -> str:
    raw.send(message)
    if isinstance(answer := raw.receive(), AwaitApproval):
        answer = raw.receive()
    assert isinstance(answer, Refused)
    assert raw.is_put_out()
    return answer.reason


Change = Callable[[RawProvider], Register]
BAD: dict[str, tuple[Change, str]] = {
    "not approved": (lambda raw: raw.registration(), "is not approved"),
    "signed for another coordinator": (
        lambda raw: raw.registration(authority="evil.example:443"),
        "not signed",
    ),
    "changed after it was signed": (
        lambda raw: msgspec.structs.replace(raw.registration(), software="other"),
        "not signed",
    ),
    "of another's identity": (
        lambda raw: msgspec.structs.replace(raw.registration(), identity=Identity.generate().public_key),
        "not signed",
    ),
    "with another's key for requests": (
        lambda raw: msgspec.structs.replace(raw.registration(), request_key=RequestKey().public),
        "not signed",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_registration_that_does_not_hold_is_refused(fleet: FleetUnderTest, fault: str) -> None:
    change, reason = BAD[fault]
    with RawProvider(fleet) as raw:
        if fault != "not approved":
            fleet.directory.approve(raw.identity.public_key, f"bad {fault}")
        assert reason in refusal(raw, change(raw))


@pytest.mark.parametrize(
    "changes",
    [
        {"offers": [Offer(MODEL, 0, 1.0, 1.0, 1.0, 1)]},
        {"offers": [Offer(MODEL, 1, float("nan"), 1.0, 1.0, 1)]},
        {"offers": [Offer(MODEL, 1, 1.0, -1.0, 1.0, 1)]},
        {"request_key_expires_s": 1},
        {"request_key_expires_s": 1 << 39},
    ],
)
def test_an_offer_that_cannot_be_is_refused(fleet: FleetUnderTest, changes: dict[str, Any]) -> None:
    with RawProvider(fleet) as raw:
        fleet.directory.approve(raw.identity.public_key, f"odd {sorted(changes)} {changes!r}"[:200])
        assert refusal(raw, raw.registration(**changes))


def test_a_registration_of_one_challenge_is_none_of_the_next(fleet: FleetUnderTest) -> None:
    with RawProvider(fleet) as raw, RawProvider(fleet) as again:
        fleet.directory.approve(raw.identity.public_key, "replayed")
        assert "not signed" in refusal(again, raw.registration())


def test_a_provider_that_says_nothing_in_time_is_refused(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, replace(OPTIONS, greeting_s=0.1))
    try:
        url = fleet.url.replace("http", "ws", 1) + "/provider"
        with connect(url, max_size=MAX_MESSAGE_BYTES, compression=None) as silent:
            data = silent.recv(timeout=WAIT_S)
            assert isinstance(data, bytes)
            assert isinstance(decode_from_coordinator(data, MAX_MESSAGE_BYTES), Refused)
            with pytest.raises(ConnectionClosed):
                silent.recv(timeout=WAIT_S)
    finally:
        fleet.close()


def test_a_provider_that_sends_nonsense_is_not_waited_for(fleet: FleetUnderTest) -> None:
    for data in (b"", b"\xc1", b"\x93" * 100, b"x" * (2 << 20), "text"):
        with RawProvider(fleet) as raw:
            raw.socket.send(data)
            assert raw.is_put_out()
    with RawProvider(fleet) as raw:
        raw.send(Heartbeat([]))
        assert isinstance(raw.receive(), Refused)


def test_a_page_in_a_browser_does_not_get_as_far_as_a_hello(fleet: FleetUnderTest) -> None:
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(f"{fleet.socket_url}/provider", origin=Origin("https://evil.example")),
    ):
        pass
    assert caught.value.response.status_code == 403


def test_one_that_waits_for_approval_is_silent_and_few_wait(tmp_path: Path) -> None:
    options = replace(OPTIONS, approval_s=60.0, approval_poll_s=60.0, max_unapproved=1)
    fleet = FleetUnderTest(tmp_path, options)
    try:
        with RawProvider(fleet) as waits, RawProvider(fleet) as late:
            waits.send(waits.registration())
            assert isinstance(waits.receive(), AwaitApproval)
            late.send(late.registration())
            answer = late.receive()
            assert isinstance(answer, Refused)
            assert (answer.again, answer.unapproved) == (True, True)
            waits.send(Heartbeat([]))
            answer = waits.receive()
            assert isinstance(answer, Refused)
            assert "speaks before it is let in" in answer.reason
            assert waits.is_put_out()
    finally:
        fleet.close()


def test_who_was_put_out_through_another_coordinator_is_put_out_here_too(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, replace(OPTIONS, prove_every_s=0.05, max_failed_proofs=10**6))

    def is_out() -> bool:
        try:
            raw.send(Heartbeat([]))
            raw.socket.recv(timeout=0.1)
        except TimeoutError:
            return False
        except ConnectionClosed:
            return True
        return False

    with RawProvider(fleet) as raw:
        raw.approved("revoked elsewhere")
        assert isinstance(raw.receive(), Prove)
        assert not is_out()
        fleet.directory.revoke_provider("revoked elsewhere")  # as another coordinator of this database does
        wait_until(is_out)
    fleet.close()


def test_who_proves_nothing_any_more_is_put_out(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, replace(OPTIONS, prove_every_s=0.2))
    try:
        with RawProvider(fleet) as honest, RawProvider(fleet) as forger:
            honest.approved("honest")
            forger.approved("forger")
            for _ in range(3):
                asked, other = honest.receive(), forger.receive()
                assert isinstance(asked, Prove)
                assert isinstance(other, Prove)
                honest.prove(asked)
                forger.send(Proof(other.nonce, bytes(64)))
            assert forger.is_put_out()
            assert isinstance(honest.receive(), Prove)
    finally:
        fleet.close()


def ask(fleet: FleetUnderTest) -> httpx.Response:
    with fleet.client() as client:
        return client.post("/v1/chat/completions", json=question(20, 22, stream=True))


def opened(raw: RawProvider, serve: Serve, name: str) -> AnswerSealer:
    facts = RequestFacts(
        provider=name,
        key_id=serve.key_id,
        model=serve.model,
        request_id=serve.request_id,
        lease=serve.lease,
        expires_s=serve.expires_s,
        max_tokens=serve.max_tokens,
        kind=serve.kind,
    )
    found = raw.key.open(facts, serve.sealed)
    assert b"20+22" in found.body
    return AnswerSealer(found.answer_secret, request_hash(facts, serve.sealed))


HEAD = b'{"status":200,"content_type":"text/event-stream"}'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"4"}}]}\n\n'


def whole(serve: Serve, sealer: AnswerSealer) -> list[FleetMessage]:
    """Return an answer as it should be."""
    return [
        Began(serve.request_id, sealer.nonce),
        Chunk(serve.request_id, sealer.seal(HEAD), 0, False),
        Chunk(serve.request_id, sealer.seal(TOKEN), 1, False),
        Chunk(serve.request_id, sealer.seal(b"data: [DONE]\n\n"), 1, False),
        Chunk(serve.request_id, sealer.seal(b"", last=True), 1, True),
        Done(serve.request_id, 14, 1),
    ]


Fault = Callable[[Serve, AnswerSealer], list[FleetMessage]]
FAULTS: dict[str, Fault] = {
    "chunks before the beginning": lambda serve, sealer: [
        Chunk(serve.request_id, sealer.seal(HEAD), 0, False)
    ],
    "a beginning twice": lambda serve, sealer: [Began(serve.request_id, sealer.nonce)] * 2,
    "done before the last chunk": lambda serve, sealer: [
        Began(serve.request_id, sealer.nonce),
        Done(serve.request_id, 1, 1),
    ],
    "a chunk that does not open": lambda serve, sealer: [
        Began(serve.request_id, sealer.nonce),
        Chunk(serve.request_id, bytes(300), 0, False),
    ],
    "a head that is none": lambda serve, sealer: [
        Began(serve.request_id, sealer.nonce),
        Chunk(serve.request_id, sealer.seal(b"no JSON"), 0, False),
    ],
    "more after it failed": lambda serve, sealer: [
        Began(serve.request_id, sealer.nonce),
        Chunk(serve.request_id, sealer.seal(HEAD), 0, False),
        Failed(serve.request_id, "no more", full=False),
        Chunk(serve.request_id, sealer.seal(b""), 4, False),
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_makes_no_sense_costs_its_provider_alone(fleet: FleetUnderTest, fault: str) -> None:
    with ThreadPoolExecutor(1) as pool, RawProvider(fleet) as raw, RawProvider(fleet) as good:
        raw.approved(fault)
        asked = pool.submit(ask, fleet)
        serve = raw.next_request()
        good.approved(f"good beside {fault}")
        for message in FAULTS[fault](serve, opened(raw, serve, fault)):
            raw.send(message)
        again = good.next_request()
        assert again.request_id != serve.request_id
        for message in whole(again, opened(good, again, f"good beside {fault}")):
            good.send(message)
        assert asked.result().status_code == 200


def test_a_provider_that_is_merely_full_uses_up_no_try(fleet: FleetUnderTest) -> None:
    with ThreadPoolExecutor(1) as pool, RawProvider(fleet) as raw:
        raw.approved("full")
        asked = pool.submit(ask, fleet)
        for _ in range(OPTIONS.max_attempts):
            raw.send(Failed(raw.next_request().request_id, "no slot", full=True))
        serve = raw.next_request()
        for message in whole(serve, opened(raw, serve, "full")):
            raw.send(message)
        assert asked.result().status_code == 200


def test_tokens_that_count_back_end_a_stream_with_an_error(fleet: FleetUnderTest) -> None:
    with ThreadPoolExecutor(1) as pool, RawProvider(fleet) as raw:
        raw.approved("counts back")
        asked = pool.submit(ask, fleet)
        serve = raw.next_request()
        sealer = opened(raw, serve, "counts back")
        raw.send(Began(serve.request_id, sealer.nonce))
        raw.send(Chunk(serve.request_id, sealer.seal(HEAD), 0, False))
        raw.send(Chunk(serve.request_id, sealer.seal(TOKEN), 2, False))
        raw.send(Chunk(serve.request_id, sealer.seal(TOKEN), 1, False))
        assert streamed(asked.result().text) == "4!the provider failed before the answer was complete"
        assert raw.is_put_out()


def test_the_last_event_waits_until_the_answer_is_settled(fleet: FleetUnderTest) -> None:
    # A client closes its connection at the last event. If it came
    # earlier, the client would pay for the tokens that were counted so far.
    with ThreadPoolExecutor(1) as pool, RawProvider(fleet) as raw:
        raw.approved("ends badly")
        asked = pool.submit(ask, fleet)
        serve = raw.next_request()
        *before, _, _ = whole(serve, opened(raw, serve, "ends badly"))
        for message in [*before, Failed(serve.request_id, "no counts", full=False)]:
            raw.send(message)
        text = asked.result().text
        assert streamed(text) == "4!the provider failed before the answer was complete"
        assert "[DONE]" not in text


def test_more_chunks_than_a_provider_has_leave_for_are_refused() -> None:
    answer = Answering("r", 4, lambda _: None)
    answer.put(Began("r", bytes(32)))
    for _ in range(4):
        answer.put(Chunk("r", b"", 0, False))
    with pytest.raises(ProviderError, match="more than 4 chunks"):
        answer.put(Chunk("r", b"", 0, False))


def test_chunks_of_a_request_that_a_provider_does_not_have_go_nowhere(fleet: FleetUnderTest) -> None:
    with ThreadPoolExecutor(1) as pool, RawProvider(fleet) as raw, RawProvider(fleet) as other:
        raw.approved("right one")
        asked = pool.submit(ask, fleet)
        serve = raw.next_request()
        other.approved("wrong one")
        sealer = opened(raw, serve, "right one")
        other.send(Began(serve.request_id, bytes(32)))
        other.send(Chunk(serve.request_id, bytes(300), 9, False))
        other.send(Done(serve.request_id, 10**9, 10**9))
        for message in whole(serve, sealer):
            raw.send(message)
        answer = asked.result()
        assert answer.status_code == 200
        assert answer.text.startswith(TOKEN.decode())
        assert answer.headers["x-convoy-provider"] == "right one"


def test_a_provider_that_says_it_gave_more_than_was_asked_is_paid_what_was_held(tmp_path: Path) -> None:
    options = replace(OPTIONS, models={MODEL: ModelOptions(Price(0, 1_000_000), 8)})
    fleet = FleetUnderTest(tmp_path, options)
    try:
        with ThreadPoolExecutor(1) as pool, RawProvider(fleet) as raw:
            raw.approved("greedy")
            asked = pool.submit(ask, fleet)
            serve = raw.next_request()
            sealer = opened(raw, serve, "greedy")
            for message in (
                Began(serve.request_id, sealer.nonce),
                Chunk(serve.request_id, sealer.seal(HEAD), 0, False),
                Chunk(serve.request_id, sealer.seal(b"data: [DONE]\n\n"), 1 << 39, False),
                Chunk(serve.request_id, sealer.seal(b"", last=True), 1 << 39, True),
                Done(serve.request_id, 1 << 39, 1 << 39),
            ):
                raw.send(message)
            assert asked.result().status_code == 200
        assert fleet.ledger.balance("ann") == 10**12 - 8
    finally:
        fleet.close()


def test_heartbeats_say_what_is_free(fleet: FleetUnderTest) -> None:
    with RawProvider(fleet) as raw:
        raw.approved("beating")

        def free() -> int:
            with fleet.admin() as admin:
                models = admin.get("/status").json()["models"]
            return next((int(one["free_slots"]) for one in models if one["model"] == MODEL), -1)

        wait_until(lambda: free() == 4)
        raw.send(Heartbeat([ModelLoad(MODEL, 1, 0, 0, 0.0), ModelLoad("another", 1, 0, 0, 0.0)]))
        wait_until(lambda: free() == 1)
        raw.send(Heartbeat([ModelLoad(MODEL, -1, 0, 0, 0.0)]))
        assert raw.is_put_out()
