"""Blind mode: through an honest coordinator, a hostile one, and one that records all it sees."""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.api.listen.options import ServeOptions
from convoy.crypto.identity import Identity, OperatorKey
from convoy.crypto.sealed.request import RequestKey, seal_request, sealed_size
from convoy.errors import ConfigError
from convoy.fleet.books.keys import Scope as KeyScope
from convoy.fleet.books.price import Price
from convoy.fleet.consumer_request import ModelOptions, read_consumer_request
from convoy.fleet.coordinator import server
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from convoy.fleet.lease import Lease, facts_of, least_prompt_tokens, read_lease
from convoy.fleet.proxy.proxy import ProxyOptions
from convoy.fleet.proxy.server import run_proxy
from convoy.fleet.proxy.trust import Trust
from convoy.wire.fleet.certified import certify
from convoy.wire.fleet.messages import Began, Chunk, Done, request_key_bytes
from convoy.wire.fleet.records import Record
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question, streamed
from support.proxy import HostileCoordinator, found_in, hostile_server, proxy
from support.scraping import scrape
from support.waiting import wait_until

OPTIONS = CoordinatorOptions(
    instance="test",
    models={MODEL: ModelOptions(Price(1_000_000, 2_000_000), 64)},
    queue=QueueLimits(50, 40, 10.0),
    first_token_s=10.0,
    lease_use_s=2.0,
)
BALANCE = 10**12


class Blind:
    """Run a fleet of two engines, a hostile coordinator before it, and a proxy that trusts its providers."""

    def __init__(self, folder: Path, stack: ExitStack, options: CoordinatorOptions = OPTIONS) -> None:
        self.fleet = FleetUnderTest(folder, options)
        stack.callback(self.fleet.close)
        self.engine = FakeEngine()
        self.engine_url = stack.enter_context(engine_server(self.engine))
        self.fleet.add("one", self.engine_url)
        self.fleet.add("two", self.engine_url)
        self.identities = list(self.fleet.identities)
        self.trust = Trust(frozenset(self.identities))
        self.hostile = HostileCoordinator(self.fleet.url)
        self.hostile_url = stack.enter_context(hostile_server(self.hostile))
        self.url = stack.enter_context(proxy(self.fleet.url, self.fleet.key, self.trust))
        self.through_hostile = stack.enter_context(proxy(self.hostile_url, self.fleet.key, self.trust))


@pytest.fixture(scope="module")
def _blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blind]:
    with ExitStack() as stack:
        yield Blind(tmp_path_factory.mktemp("blind"), stack)


@pytest.fixture
def blind(_blind: Blind) -> Blind:
    """Reset it: honest again, and with nothing in its record."""
    hostile = _blind.hostile
    hostile.lease, hostile.records = (lambda lease: lease), (lambda records: records)
    hostile.sealed_answer, hostile.headers, hostile.got, hostile.posted = None, {}, b"", []
    _blind.engine.trouble.clear()
    return _blind


def ask(url: str, one: int, two: int, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = question(one, two, **more)
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30, trust_env=False)


def at_rest(blind: Blind) -> int:
    """Return the balance, once nothing is held for any account."""
    ledger = blind.fleet.ledger
    wait_until(lambda: ledger.balance("ann") + sum(one.cost_micro for one in ledger.usage("ann")) == BALANCE)
    return ledger.balance("ann")


def content(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_whole_answer_comes_through_sealed_end_to_end_and_is_charged(blind: Blind) -> None:
    before = at_rest(blind)
    answer = ask(blind.url, 20, 22)
    assert content(answer) == "42"
    assert answer.headers["x-convoy-sealed"] == "end-to-end"
    assert answer.headers["x-convoy-provider-key"] in {one.hex() for one in blind.identities}
    assert "x-convoy-usage-differs" not in answer.headers
    times = msgspec.json.decode(answer.headers["x-timing"])
    assert times["total_e2e_us"] > 0
    assert blind.fleet.ledger.balance("ann") == before - (14 + 2 * 2)


def test_a_stream_cannot_be_resumed_at_a_proxy(blind: Blind) -> None:
    url, again = f"{blind.url}/v1/chat/completions", {"last-event-id": "1-1"}
    answer = httpx.post(url, json=question(20, 22, stream=True), headers=again, timeout=60.0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


def test_a_whole_answer_without_end_is_no_answer(blind: Blind) -> None:
    with proxy(blind.fleet.url, blind.fleet.key, blind.trust, max_whole_bytes=12) as url:
        answer = ask(url, 20, 22)
    assert answer.status_code == 503
    assert "more than 12 bytes" in answer.json()["error"]["message"]


def test_a_proxy_counts_what_became_of_its_requests_and_says_nothing_of_them(blind: Blind) -> None:
    before = scrape(f"{blind.url}/metrics")
    assert ask(blind.url, 876543, 1).status_code == 200
    assert ask(blind.url, 876543, 1, model="nobody-serves-this").status_code == 404
    after = scrape(f"{blind.url}/metrics")

    def grew(name: str, **labels: str) -> float:
        return after(name, **labels) - (before(name, **labels) if before.has(name, **labels) else 0)

    assert grew("convoy_proxy_requests_total", outcome="complete") == 1
    assert grew("convoy_proxy_requests_total", outcome="refusal") == 1
    assert grew("convoy_proxy_plain_total") == grew("convoy_proxy_usage_differs_total") == 0
    assert grew("convoy_http_requests_total", path="/v1/chat/completions", status="404") == 1
    for secret in ("876543", "876544", "nobody-serves-this", blind.fleet.key):
        assert secret not in after.text


def test_a_stream_comes_through_sealed_end_to_end(blind: Blind) -> None:
    answer = ask(blind.url, 20, 22, stream=True)
    assert streamed(answer.text) == "42."
    assert answer.headers["x-convoy-sealed"] == "end-to-end"
    assert ": timing " in answer.text
    assert "usage differs" not in answer.text


def test_the_openai_client_works_through_the_proxy(blind: Blind) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{blind.url}/v1", api_key="any")
    messages: Any = question(20, 22)["messages"]
    whole = client.chat.completions.create(model=MODEL, messages=messages)
    assert whole.choices[0].message.content == "42"
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "42"
    assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize("stream", [False, True])
def test_a_provider_that_fails_before_its_first_token_is_replaced_unseen(blind: Blind, stream: bool) -> None:
    blind.engine.trouble[:] = ["broken" if stream else "busy"]
    answer = ask(blind.through_hostile, 20, 22, stream=stream)
    assert (streamed(answer.text).rstrip(".") if stream else content(answer)) == "42"
    assert len([one for one in blind.hostile.posted if one.startswith("POST /v1/leases/")]) == 2


def test_a_stream_that_breaks_ends_with_an_error(blind: Blind) -> None:
    blind.engine.trouble[:] = ["cut"]
    assert streamed(ask(blind.url, 20, 22, stream=True).text).startswith("4!the provider failed")
    assert blind.fleet.ledger.check() == []


def test_a_refusal_of_the_engine_reaches_whoever_asked(blind: Blind) -> None:
    blind.engine.trouble[:] = ["refuses"]
    answer = ask(blind.url, 1, 2)
    assert answer.status_code == 400
    assert "too hot" in answer.json()["error"]["message"]
    assert ask(blind.url, 1, 2, model="other").status_code == 404
    assert ask(blind.url, 1, 2, max_tokens=-2).json()["error"]["param"] == "max_tokens"


def test_after_a_whole_answer_the_same_idempotency_key_is_another_request(blind: Blind) -> None:
    before = at_rest(blind)
    headers = {"idempotency-key": "a key of the tool"}
    for times in (1, 2):
        assert content(ask(blind.through_hostile, 20, 22, headers)) == "42"
        assert blind.fleet.ledger.balance("ann") == before - 18 * times
    assert ask(blind.url, 20, 23, headers).status_code == 200  # another proxy's keys are its own
    assert ask(blind.through_hostile, 20, 23, headers).status_code == 409
    assert b"a key of the tool" not in blind.hostile.got


def test_a_key_of_a_blind_request_is_no_key_to_larger_ones(blind: Blind) -> None:
    """Seal another body each time: the tag does not bind it."""
    before, key = at_rest(blind), blind.fleet.key
    lease = read_lease(lease_of(blind, key, "one key").content, Lease)
    wanted = read_consumer_request(msgspec.json.encode(question(20, 22, max_tokens=50)), "chat", "", {})
    sealed, _ = seal_request(lease.request_key, facts_of(lease, wanted), wanted.body)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/vnd.convoy.sealed"}
    url = f"{blind.fleet.url}/v1/leases/{lease.lease}"
    assert httpx.post(url, content=sealed, headers=headers, trust_env=False).status_code == 200
    assert at_rest(blind) == before - 18
    for larger in ({"max_tokens": 1 << 20}, {"most_prompt_tokens": 10**6}, {"stream": True}):
        assert lease_of(blind, key, "one key", **larger).status_code == 409
    assert lease_of(blind, key, "one key").status_code == 200
    assert blind.fleet.ledger.balance("ann") == before - 18 - 3100  # the first was whole: this is another one
    assert at_rest(blind) == before - 18


def test_what_is_sent_in_plain_after_all_may_have_a_key_too(blind: Blind) -> None:
    nobody = Trust(frozenset({bytes(32)}))
    with proxy(blind.fleet.url, blind.fleet.key, nobody, allow_plain=True) as url:
        assert content(ask(url, 20, 22, {"idempotency-key": "in plain"})) == "42"


# Coordinators that lie.


def _own_provider(lease: dict[str, Any]) -> dict[str, Any]:
    identity, key = Identity.generate(), RequestKey()
    said = request_key_bytes(key.public, lease["request_key_expires_s"])
    return {
        **lease,
        "identity": msgspec.to_builtins(identity.public_key),
        "request_key": msgspec.to_builtins(key.public),
        "key_signature": msgspec.to_builtins(identity.sign(said)),
    }


LEASES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another key": (
        lambda lease: {**lease, "request_key": msgspec.to_builtins(RequestKey().public)},
        "not signed by its provider",
    ),
    "a provider of its own": (_own_provider, "no provider that this proxy trusts"),
    "a trusted name for a provider of its own": (
        lambda lease: {**_own_provider(lease), "identity": lease["identity"]},
        "not signed by its provider",
    ),
    "no certification": (
        lambda lease: {**lease, "key_signature": msgspec.to_builtins(bytes(64))},
        "not signed by its provider",
    ),
    "a key that lives longer": (
        lambda lease: {**lease, "request_key_expires_s": lease["request_key_expires_s"] + 3600},
        "not signed by its provider",
    ),
    "an expired lease": (lambda lease: {**lease, "expires_s": 1}, "expired"),
    "a lease for ever": (lambda lease: {**lease, "expires_s": 1 << 39}, "lives longer"),
    "an answer in clear": (lambda _: {"choices": [{"message": {"content": "5"}}]}, "no lease"),
    "nonsense": (lambda _: [1, 2], "no lease"),
}


@pytest.mark.parametrize("fault", LEASES)
def test_a_lease_that_is_not_of_a_trusted_provider_gets_nothing(blind: Blind, fault: str) -> None:
    blind.hostile.lease, reason = LEASES[fault]
    answer = ask(blind.through_hostile, 52713391, 19282736)
    assert answer.status_code == 503
    assert reason in answer.json()["error"]["message"]
    assert "x-convoy-sealed" not in answer.headers
    assert not [one for one in blind.hostile.posted if one.startswith("POST /v1/leases/")]
    assert found_in(blind.hostile.got, "52713391+19282736") == []


def test_the_lease_of_one_trusted_provider_with_the_key_of_another_gets_nothing(blind: Blind) -> None:
    one, two = (msgspec.to_builtins(key) for key in blind.identities)

    def swap(lease: dict[str, Any]) -> dict[str, Any]:
        return {**lease, "identity": two if lease["identity"] == one else one}

    blind.hostile.lease = swap
    answer = ask(blind.through_hostile, 1, 2)
    assert "not signed by its provider" in answer.json()["error"]["message"]


def test_an_old_lease_is_not_used_again(blind: Blind) -> None:
    first: list[dict[str, Any]] = []

    def replay(lease: dict[str, Any]) -> dict[str, Any]:
        first.append(lease)
        return first[0]

    blind.hostile.lease = replay
    assert ask(blind.through_hostile, 1, 2).status_code == 200
    answer = ask(blind.through_hostile, 1, 2)
    assert (answer.status_code, "same lease twice" in answer.text) == (503, True)


def test_a_lease_that_names_other_limits_does_not_open(blind: Blind) -> None:
    """What the provider is told beside the body is bound to it: here, until when it may be opened."""
    blind.hostile.lease = lambda lease: {**lease, "expires_s": lease["expires_s"] + 60}
    answer = ask(blind.through_hostile, 1, 2)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "sealed_body_refused"
    assert ask(blind.url, 1, 2).status_code == 200  # and no provider counts as broken for it


def test_a_sealed_body_that_opens_nowhere_harms_nobody_else(blind: Blind) -> None:
    before = at_rest(blind)
    headers = {"authorization": f"Bearer {blind.fleet.key}", "content-type": "application/vnd.convoy.sealed"}
    for _ in range(10):
        lease = lease_of(blind, blind.fleet.key).json()["lease"]
        url = f"{blind.fleet.url}/v1/leases/{lease}"
        refused = httpx.post(url, content=bytes(2160), headers=headers, trust_env=False)
        assert refused.json()["error"]["code"] == "sealed_body_refused"
    assert blind.fleet.ledger.balance("ann") == before
    with blind.fleet.admin() as admin:
        model = admin.get("/status").json()["models"][0]
    assert model["free_slots"] == 8


def _changed(records: list[Record], index: int, **changes: Any) -> list[Record]:
    """Change the chunk of that number."""
    chunks = [place for place, record in enumerate(records) if isinstance(record, Chunk)]
    place = chunks[index]
    return [*records[:place], msgspec.structs.replace(records[place], **changes), *records[place + 1 :]]


def _sealed(records: list[Record], index: int) -> bytes:
    chunk = [record for record in records if isinstance(record, Chunk)][index]
    return chunk.sealed[:-1] + bytes([chunk.sealed[-1] ^ 1])


RECORDS: dict[str, Callable[[list[Record]], list[Record]]] = {
    "a chunk left out": lambda records: [*records[:2], *records[3:]],
    "the head left out": lambda records: [records[0], *records[2:]],
    "a chunk twice": lambda records: [*records[:3], records[2], *records[3:]],
    "two chunks exchanged": lambda records: [records[0], records[2], records[1], *records[3:]],
    "cut after the first": lambda records: records[:3],
    "cut before the last": lambda records: [one for one in records if not getattr(one, "last", False)],
    "nothing at all": lambda _: [],
    "no beginning": lambda records: records[1:],
    "an inner chunk marked as last": lambda records: _changed(records, 1, last=True),
    "the last one not marked": lambda records: _changed(records, -1, last=False),
    "a changed chunk": lambda records: _changed(records, 1, sealed=_sealed(records, 1)),
    "a chunk in clear": lambda records: _changed(records, 1, sealed=b"data: [DONE]\n\n"),
    "keys from another nonce": lambda records: [Began("r", bytes(32)), *records[1:]],
    "more after the last": lambda records: [*records, records[1]],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", RECORDS)
def test_an_answer_that_was_tampered_with_is_never_whole(blind: Blind, fault: str, stream: bool) -> None:
    blind.hostile.records = RECORDS[fault]
    answer = ask(blind.through_hostile, 20, 22, stream=stream)
    if stream and answer.status_code == 200:
        assert '"error"' in answer.text.strip().splitlines()[-1]
        return
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "peer_failed"
    assert "42" not in answer.text


def test_a_bill_that_is_not_what_the_provider_counts_is_shown(blind: Blind) -> None:
    def dearer(records: list[Record]) -> list[Record]:
        return [Done(one.request_id, 900, 900) if isinstance(one, Done) else one for one in records]

    blind.hostile.records = dearer
    answer = ask(blind.through_hostile, 20, 22)
    assert answer.headers["x-convoy-usage-differs"] == "billed 900+900, sealed 14+2"
    assert ": usage differs: billed 900+900" in ask(blind.through_hostile, 20, 22, stream=True).text
    blind.hostile.records = lambda records: [one for one in records if not isinstance(one, Done)]
    assert "no bill" in ask(blind.through_hostile, 20, 22).headers["x-convoy-usage-differs"]


def test_an_answer_in_clear_is_refused(blind: Blind) -> None:
    blind.hostile.sealed_answer = JSONResponse({"choices": [{"message": {"content": "5"}}]})
    answer = ask(blind.through_hostile, 20, 22)
    assert answer.status_code == 503
    assert "clear text" in answer.json()["error"]["message"]


def test_whether_it_was_blind_is_said_by_the_proxy_alone(blind: Blind) -> None:
    blind.hostile.headers = {"x-convoy-sealed": "by-coordinator", "x-convoy-provider": "evil"}
    sealed = ask(blind.through_hostile, 1, 2, {"x-convoy-sealed": "by-coordinator"})
    assert sealed.headers.get_list("x-convoy-sealed") == ["end-to-end"]
    assert "x-convoy-provider" not in sealed.headers
    blind.hostile.headers = {"x-convoy-sealed": "end-to-end"}
    blind.hostile.lease = _own_provider
    with proxy(blind.hostile_url, blind.fleet.key, blind.trust, allow_plain=True) as url:
        plain = ask(url, 1, 2)
    assert content(plain) == "3"
    assert plain.headers.get_list("x-convoy-sealed") == ["by-coordinator"]


def test_without_anybody_to_trust_nothing_is_sent_unless_that_is_allowed(blind: Blind) -> None:
    nobody = Trust(frozenset({bytes(32)}))
    with proxy(blind.hostile_url, blind.fleet.key, nobody) as url:
        refused = ask(url, 52713391, 19282736)
    assert refused.status_code == 503
    assert "trust the provider with key" in refused.json()["error"]["message"]
    assert found_in(blind.hostile.got, "52713391+19282736") == []
    with pytest.raises(ConfigError, match="trusts no key"):
        run_proxy(blind.fleet.url, "key", ProxyOptions(Trust()), ServeOptions(port=0))
    with pytest.raises(ConfigError, match="loopback alone"):
        run_proxy(blind.fleet.url, "key", ProxyOptions(nobody), ServeOptions("192.0.2.1", 0))
    with pytest.raises(ConfigError, match="without TLS"):
        run_proxy("http://example.com", "key", ProxyOptions(nobody), ServeOptions(port=0))


def test_the_coordinator_sends_it_to_those_who_are_trusted(blind: Blind) -> None:
    for identity in blind.identities:
        with proxy(blind.fleet.url, blind.fleet.key, Trust(frozenset({identity}))) as url:
            for _ in range(3):
                assert ask(url, 1, 2).headers["x-convoy-provider-key"] == identity.hex()


def lease_of(blind: Blind | FleetUnderTest, key: str, again: str = "", **more: Any) -> httpx.Response:
    asked = {
        "model": MODEL,
        "kind": "chat",
        "stream": False,
        "prompt_tokens": 10,
        "most_prompt_tokens": 3000,
        "max_tokens": 50,
        "providers": [],
        "operators": [],
        "tag": msgspec.to_builtins(bytes(32)),
        "body_tag": msgspec.to_builtins(bytes(32)),
    } | more
    headers = {"authorization": f"Bearer {key}"} | ({"idempotency-key": again} if again else {})
    url = blind.url if isinstance(blind, FleetUnderTest) else blind.fleet.url
    return httpx.post(f"{url}/v1/leases", json=asked, headers=headers, trust_env=False)


def test_a_lease_that_is_not_used_is_given_back(blind: Blind) -> None:
    before = at_rest(blind)
    lease = lease_of(blind, blind.fleet.key).json()
    assert blind.fleet.ledger.balance("ann") == before - 3100
    wait_until(lambda: blind.fleet.ledger.balance("ann") == before)
    headers = {"authorization": f"Bearer {blind.fleet.key}", "content-type": "application/vnd.convoy.sealed"}
    url = f"{blind.fleet.url}/v1/leases/{lease['lease']}"
    late = httpx.post(url, content=b"x", headers=headers, trust_env=False)
    assert late.status_code == 404
    assert blind.fleet.ledger.check() == []


def test_a_lease_is_its_accounts_alone_and_takes_no_more_than_it_was_asked_for(blind: Blind) -> None:
    fleet = blind.fleet
    if "eve" not in fleet.ledger.balances():
        fleet.ledger.open_account("eve")
    eve = fleet.directory.make_key(KeyScope.CONSUMER, "eve")
    before = at_rest(blind)
    url = f"{fleet.url}/v1/leases/{lease_of(blind, fleet.key).json()['lease']}"

    def send(key: str, size: int) -> int:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/vnd.convoy.sealed"}
        return httpx.post(url, content=bytes(size), headers=headers, trust_env=False).status_code

    assert send(eve, 2000) == 404
    assert send(fleet.key, 3001) == 400
    assert fleet.ledger.balance("ann") == before
    assert lease_of(blind, eve).status_code == 402
    assert lease_of(blind, "nobody").status_code == 401


def test_leases_that_are_asked_for_at_once_are_counted_at_once(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, replace(OPTIONS, max_leases=2))
    with engine_server(FakeEngine()) as engine_url, ThreadPoolExecutor(4) as pool:
        fleet.add("one", engine_url)
        asked = [pool.submit(lease_of, fleet, fleet.key) for _ in range(4)]
        assert sorted(one.result().status_code for one in asked) == [200, 200, 429, 429]
        fleet.close()


def test_who_leaves_a_blind_answer_pays_for_as_long_a_prompt_as_it_sealed() -> None:
    for body in (0, 100, 3000, 100_000, 8_000_000):
        least = least_prompt_tokens(sealed_size(body))
        assert body // 7 - 500 <= least <= max(1, body // 4)


def test_a_provider_that_an_operator_certified_is_trusted(blind: Blind) -> None:
    operator, other = OperatorKey.generate(), OperatorKey.generate()
    identity = Identity.generate()
    certificate = certify(operator, identity.public_key, "three", int(time.time()) + 60)
    blind.fleet.add("three", blind.engine_url, identity=identity, certificate=certificate)
    try:
        trust = Trust(operators=frozenset({operator.public_key}))
        with proxy(blind.fleet.url, blind.fleet.key, trust) as url:
            answer = ask(url, 20, 22)
        assert answer.headers["x-convoy-provider-key"] == identity.public_key.hex()
        with proxy(
            blind.fleet.url, blind.fleet.key, replace(trust, operators=frozenset({other.public_key}))
        ) as url:
            assert ask(url, 20, 22).status_code == 503
    finally:
        blind.fleet.stop_provider(2)


# A coordinator that wants to read.

SECRET = "the heron flies at midnight, says Zoë"
ANSWER = "71996127"


class Tap:
    """Wrap the coordinator's application, and keep all that it is given and gives."""

    def __init__(self) -> None:
        self.seen = bytearray()

    def around(self, app: ASGIApp) -> ASGIApp:
        async def tapped(scope: Scope, receive: Receive, send: Send) -> None:
            self.seen += repr(scope.get("headers")).encode() + str(scope.get("path")).encode()

            async def receive_it() -> Message:
                return self._see(await receive())

            async def send_it(message: Message) -> None:
                await send(self._see(message))

            await app(scope, receive_it, send_it)

        return tapped

    def _see(self, message: Message) -> Message:
        for name in ("body", "bytes", "text", "headers"):
            value = message.get(name) or b""
            self.seen += value if isinstance(value, bytes) else repr(value).encode()
        return message


def test_a_coordinator_that_wants_to_read_has_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tap, make = Tap(), server.make_public_app
    monkeypatch.setattr(server, "make_public_app", lambda *arguments: tap.around(make(*arguments)))
    body = question(52713391, 19282736)
    body["messages"][0]["content"] += f" {SECRET}"

    def capture(url: str) -> bytes:
        tap.seen.clear()
        caplog.clear()
        headers = {"authorization": f"Bearer {fleet.key}"}
        for stream in (False, True):
            more = {"stream": stream, "user": SECRET}
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={**body, **more},
                headers=headers,
                timeout=30,
                trust_env=False,
            )
            assert (streamed(answer.text).rstrip(".") if stream else content(answer)) == ANSWER
        stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        return bytes(tap.seen) + stored + caplog.text.encode()

    with ExitStack() as stack:
        fleet = FleetUnderTest(tmp_path, OPTIONS)
        stack.callback(fleet.close)
        fleet.add("one", stack.enter_context(engine_server(FakeEngine())))
        trust = Trust(frozenset(fleet.identities))
        url = stack.enter_context(proxy(fleet.url, fleet.key, trust))
        sealed, plain = capture(url), capture(fleet.url)
    whole = body["messages"][0]["content"]
    texts = [SECRET, "52713391", ANSWER, "heron", whole, msgspec.json.encode(body["messages"]).decode()]
    assert {text: found_in(sealed, text) for text in texts} == {text: [] for text in texts}
    assert [word for word in (b'"messages"', b'"choices"', b'"delta"', b"[DONE]") if word in sealed] == []
    beginning = f"\n{MODEL}\n".encode() + msgspec.json.encode(body["messages"])
    name = hashlib.sha256(beginning).digest()  # what names beginnings in plain: anybody could try it
    assert [one for one in (name, name.hex().encode(), base64.b64encode(name)) if one in sealed] == []
    assert MODEL.encode() in sealed
    # in plain all of that is there: so it would have been found
    assert found_in(plain, SECRET)
    assert found_in(plain, ANSWER)
