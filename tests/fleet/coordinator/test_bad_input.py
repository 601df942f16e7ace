"""Send invalid input, line by line: a proper status and message, and no effect on other requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.responses import JSONResponse
from websockets.sync.server import ServerConnection, serve

from convoy.crypto.identity import Identity
from convoy.crypto.sealed.request import RequestFacts, key_id_of, seal_request
from convoy.fleet.books.keys import Scope
from convoy.fleet.consumer_request import read_consumer_request
from convoy.fleet.coordinator.providers.proof import CoordinatorProof
from convoy.fleet.coordinator.requests.attempt import serve_of
from convoy.fleet.lease import Lease, facts_of
from convoy.fleet.provider.provide import ProvideOptions, Provider
from convoy.fleet.provider.upstream import Upstream
from convoy.wire.fleet.messages import (
    MAX_MESSAGE_BYTES,
    Began,
    Chunk,
    Done,
    Failed,
    FleetMessage,
    FromProvider,
    Heartbeat,
    Offer,
    ProviderHello,
    Register,
    Registered,
    Serve,
    decode_from_provider,
    encode_fleet,
)
from fleet.coordinator.providers.test_connection import HEAD, RawProvider, opened, refusal, whole
from fleet.proxy.test_proxy import LEASES, OPTIONS, Blind
from support.fleet import FAST, MODEL, FakeEngine, Running, engine_server, question, streamed
from support.proxy import proxy
from support.waiting import wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blind]:
    with ExitStack() as stack:
        # On a busy machine a test may use its leases late.
        made = Blind(tmp_path_factory.mktemp("bad"), stack, replace(OPTIONS, lease_use_s=30.0))
        made.fleet.ledger.open_account("bob")
        made.fleet.ledger.credit("bob", 10**9)
        yield made


@dataclass(frozen=True)
class Bob:
    """Hold another consumer's key, and the addresses at which he asks: in plain, and through a proxy."""

    key: str
    urls: tuple[str, str]


@pytest.fixture(scope="module")
def bob(blind: Blind) -> Iterator[Bob]:
    key = blind.fleet.directory.make_key(Scope.CONSUMER, "bob")
    with proxy(blind.fleet.url, key, blind.trust) as through:
        yield Bob(key, (blind.fleet.url, through))


@pytest.fixture(autouse=True)
def _bystanders(blind: Blind, bob: Bob) -> Iterator[None]:
    """Run one stream in plain and one through a proxy meanwhile; both are right, and paid for."""
    fleet, engine = blind.fleet, blind.engine
    blind.hostile.lease, blind.hostile.posted = (lambda lease: lease), []
    before = fleet.ledger.balance("bob")
    engine.go_on.clear()
    begun = threading.Semaphore(0)

    def told(url: str) -> str:
        headers, body = {"authorization": f"Bearer {bob.key}"}, question(20, 22, stream=True)
        with (
            httpx.Client(headers=headers, timeout=60, trust_env=False) as client,
            client.stream("POST", url + CHAT, json=body) as answer,
        ):
            pieces = answer.iter_text()
            first = next(pieces)
            begun.release()
            return first + "".join(pieces)

    with ThreadPoolExecutor(2) as pool:
        asked = []
        for url in bob.urls:
            engine.trouble[:] = ["slow"]
            asked.append(pool.submit(told, url))
            assert begun.acquire(timeout=30), [one.exception() for one in asked if one.done()]
        try:
            yield
        finally:
            engine.go_on.set()
        assert [streamed(one.result()) for one in asked] == ["42.", "42."]
    wait_until(lambda: fleet.ledger.balance("bob") == before - 2 * (14 + 2 * 2))
    assert fleet.ledger.check() == []


@dataclass(frozen=True)
class Line:
    """Hold an invalid request, and the expected outcome."""

    ask: Callable[[Blind], httpx.Response]
    status: int
    words: str


def post(blind: Blind, body: Any, key: str | None = None, path: str = CHAT, **more: Any) -> httpx.Response:
    key = blind.fleet.key if key is None else key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers |= {"content-type": "application/json"} | more
    return httpx.post(blind.fleet.url + path, headers=headers, timeout=30, trust_env=False, **sent)


def revoked(blind: Blind) -> str:
    directory = blind.fleet.directory
    if "carol" not in blind.fleet.ledger.balances():
        blind.fleet.ledger.open_account("carol")
    key = directory.make_key(Scope.CONSUMER, "carol")
    with blind.fleet.admin() as admin:
        said = admin.post("/keys/revoke", json={"account": "carol", "hint": key[7:11]})
    assert said.json()["revoked"] >= 1
    return key


def poor(blind: Blind) -> str:
    if "poor" not in blind.fleet.ledger.balances():
        blind.fleet.ledger.open_account("poor")
    return blind.fleet.directory.make_key(Scope.CONSUMER, "poor")


def admin(blind: Blind, path: str, body: dict[str, Any]) -> httpx.Response:
    with blind.fleet.admin() as client:
        return client.post(path, json=body)


def through(blind: Blind, key: str, body: dict[str, Any]) -> httpx.Response:
    with proxy(blind.fleet.url, key, blind.trust) as url:
        return httpx.post(url + CHAT, json=body, timeout=30, trust_env=False)


def leased(blind: Blind, key: str | None = None, **changes: Any) -> httpx.Response:
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
    }
    return post(blind, asked | changes, key, "/v1/leases")


LINES: dict[str, Line] = {
    "no key": Line(lambda b: post(b, question(1, 2), ""), 401, "no api key"),
    "a wrong key": Line(lambda b: post(b, question(1, 2), "convoy-nobody"), 401, "key"),
    "a wrong key, through a proxy": Line(lambda b: through(b, "convoy-nobody", question(1, 2)), 401, "key"),
    "a wrong key, for a lease": Line(lambda b: leased(b, "convoy-nobody"), 401, "key"),
    "a revoked key": Line(lambda b: post(b, question(1, 2), revoked(b)), 401, "key"),
    "a revoked key, through a proxy": Line(lambda b: through(b, revoked(b), question(1, 2)), 401, "key"),
    "an administrator's key": Line(lambda b: post(b, question(1, 2), b.fleet.admin_key), 403, "key"),
    "an unknown model": Line(lambda b: post(b, question(1, 2, model="nobody's")), 404, "not served here"),
    "an unknown model, through a proxy": Line(
        lambda b: through(b, b.fleet.key, question(1, 2, model="nobody's")), 404, "not served here"
    ),
    "a body over the limit": Line(lambda b: post(b, b" " * (8 * 1024 * 1024 + 1)), 413, "8388608"),
    "a lease over the limit": Line(
        lambda b: post(b, b" " * (64 * 1024 + 1), path="/v1/leases"), 413, "65536"
    ),
    "no JSON": Line(lambda b: post(b, b'{"model": "adder"'), 400, "not valid JSON"),
    "JSON that nests without end": Line(lambda b: post(b, b"[" * 100_000), 400, "JSON"),
    "JSON that is no object": Line(lambda b: post(b, b"[1]"), 400, "not an object"),
    "no JSON for a lease": Line(lambda b: post(b, b"{", path="/v1/leases"), 400, "no lease"),
    "a negative amount": Line(lambda b: post(b, question(1, 2, max_tokens=-2)), 400, "max_tokens"),
    "an amount that overflows": Line(
        lambda b: post(b, question(1, 2, max_tokens=1 << 70)), 400, "max_tokens"
    ),
    "an amount that is no number": Line(
        lambda b: post(b, b'{"model": "adder", "messages": [], "max_tokens": 1e400}'), 400, ""
    ),
    "an amount of choices that overflows": Line(
        lambda b: post(b, question(1, 2, n=1 << 40)), 400, "n: expected"
    ),
    "a lease for a negative amount": Line(lambda b: leased(b, max_tokens=-1), 400, "no lease"),
    "a lease for an amount that overflows": Line(
        lambda b: leased(b, most_prompt_tokens=1 << 63), 400, "no lease"
    ),
    "a negative credit": Line(
        lambda b: admin(b, "/credits", {"account": "ann", "amount_micro": -5}), 400, "amount"
    ),
    "a credit that overflows": Line(
        lambda b: admin(b, "/credits", {"account": "ann", "amount_micro": 1 << 62}), 400, "amount"
    ),
    "an account without balance": Line(lambda b: post(b, question(1, 2), poor(b)), 402, "poor has 0"),
    "an account without balance, through a proxy": Line(
        lambda b: through(b, poor(b), question(1, 2)), 402, "poor has 0"
    ),
    "a lease that is not there": Line(
        lambda b: post(b, b"x", path="/v1/leases/none"), 404, "there is no such lease"
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_a_consumers_bad_input_is_refused_by_name(blind: Blind, line: str) -> None:
    expected, before = LINES[line], blind.fleet.ledger.balance("ann")
    answer = expected.ask(blind)
    error = answer.json()["error"]
    assert (answer.status_code, expected.words in error["message"]) == (expected.status, True), error
    assert error["type"]
    assert blind.fleet.ledger.balance("ann") == before


# Providers.


@contextmanager
def eager(blind: Blind, name: str) -> Iterator[RawProvider]:
    """Yield a provider that claims such speed that every next request goes to it."""
    with RawProvider(blind.fleet) as raw:
        blind.fleet.directory.approve(raw.identity.public_key, name)
        raw.send(raw.registration(offers=[Offer(MODEL, 4, 1e6, 4e6, 1e6, 4096)]))
        assert isinstance(raw.receive(), Registered)
        yield raw


def ask(blind: Blind) -> httpx.Response:
    return post(blind, question(20, 22, stream=True))


def test_chunks_of_requests_that_a_provider_does_not_have_reach_nobody(blind: Blind) -> None:
    with eager(blind, "chunks for others") as raw, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, blind)
        mine = raw.next_request()
        for name in ("fleet-" + "0" * 24 + "-1", "r1", "x" * 64, mine.request_id[:-1] + "9"):
            raw.send(Began(name, bytes(32)))
            raw.send(Chunk(name, bytes(300), 9, False))
            raw.send(Chunk(name, bytes(300), 9, True))
            raw.send(Done(name, 10**9, 10**9))
            raw.send(Failed(name, "no", full=False))
        for message in whole(mine, opened(raw, mine, "chunks for others")):
            raw.send(message)
        assert streamed(asked.result().text) == "4."


def test_an_answer_that_is_given_twice_is_read_and_paid_for_once(blind: Blind) -> None:
    before = blind.fleet.ledger.balance("ann")
    with eager(blind, "twice") as raw, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, blind)
        mine = raw.next_request()
        told = whole(mine, opened(raw, mine, "twice"))
        for message in [*told, told[-1], *told]:
            raw.send(message)
        answer = asked.result()
        assert streamed(answer.text) == "4."
        assert answer.text.count("[DONE]") == 1
        raw.send(Heartbeat([]))
        asked = pool.submit(ask, blind)  # the double belongs to no request, and the next one is served
        mine = raw.next_request()
        for message in whole(mine, opened(raw, mine, "twice")):
            raw.send(message)
        assert streamed(asked.result().text) == "4."
    assert blind.fleet.ledger.balance("ann") == before - 2 * (14 + 2)


def test_an_answer_that_ends_twice_while_it_runs_costs_its_provider_alone(blind: Blind) -> None:
    before = blind.fleet.ledger.balance("ann")
    with eager(blind, "ends twice") as raw, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, blind)
        mine = raw.next_request()
        sealer = opened(raw, mine, "ends twice")
        for message in (
            Began(mine.request_id, sealer.nonce),
            Chunk(mine.request_id, sealer.seal(HEAD), 0, False),
            last := Chunk(mine.request_id, sealer.seal(b"", last=True), 0, True),
            last,
        ):
            raw.send(message)
        assert raw.is_put_out()
        answer = asked.result()  # of another, which the first one's nonsense did not reach
        assert streamed(answer.text) == "42."
        assert answer.headers["x-convoy-provider"] in {"one", "two"}
    assert blind.fleet.ledger.balance("ann") == before - 18


def test_a_registration_with_a_wrong_signature_is_refused(blind: Blind) -> None:
    with RawProvider(blind.fleet) as raw:
        blind.fleet.directory.approve(raw.identity.public_key, "wrongly signed")
        wrong = msgspec.structs.replace(raw.registration(), signature=bytes(64))
        assert "not signed" in refusal(raw, wrong)
    with RawProvider(blind.fleet) as thief:  # in the name of one that is here, and runs a bystander's
        stolen = msgspec.structs.replace(thief.registration(), identity=blind.identities[0])
        assert "not signed" in refusal(thief, stolen)
    with blind.fleet.admin() as client:
        assert {one["name"] for one in client.get("/status").json()["providers"]} == {"one", "two"}


# Sealed bodies.

SEALED = {"content-type": "application/vnd.convoy.sealed"}
BODY = msgspec.json.encode(question(20, 22, max_tokens=50))


def lease_of(blind: Blind) -> Lease:
    answer = leased(blind)
    assert answer.status_code == 200
    return msgspec.json.decode(answer.content, type=Lease)


def sealed_for(lease: Lease, other: Lease | None = None) -> bytes:
    """Seal as a proxy does; for ``other``'s provider, if there is one."""
    wanted, to = read_consumer_request(BODY, "chat", "", {}), other or lease
    facts = replace(facts_of(lease, wanted), provider=to.provider, key_id=key_id_of(to.request_key))
    return seal_request(to.request_key, facts, wanted.body)[0]


def use(blind: Blind, lease: Lease, sealed: bytes) -> httpx.Response:
    return post(blind, sealed, None, f"/v1/leases/{lease.lease}", **SEALED)


def refused_body(answer: httpx.Response) -> bool:
    return answer.status_code == 400 and answer.json()["error"]["code"] == "sealed_body_refused"


def test_a_sealed_body_for_another_provider_is_refused(blind: Blind) -> None:
    before = blind.fleet.ledger.balance("ann")
    # More than one provider has free slots.
    leases = [lease_of(blind) for _ in range(5)]
    by_name = {lease.provider: lease for lease in leases}
    assert set(by_name) == {"one", "two"}
    for lease in leases:
        other = by_name["two" if lease.provider == "one" else "one"]
        assert refused_body(use(blind, lease, sealed_for(lease, other)))
        # A lease is used once.
        assert use(blind, lease, sealed_for(lease)).status_code == 404
    assert blind.fleet.ledger.balance("ann") == before


def test_a_sealed_body_that_is_replayed_is_refused(blind: Blind) -> None:
    before = blind.fleet.ledger.balance("ann")
    first, second = lease_of(blind), lease_of(blind)
    sealed = sealed_for(first)
    assert use(blind, first, sealed).status_code == 200
    assert use(blind, first, sealed).status_code == 404
    assert refused_body(use(blind, second, sealed))
    assert blind.fleet.ledger.balance("ann") == before - 18


def _serve_of(registered: Register, request_id: str) -> Serve:
    wanted = read_consumer_request(
        msgspec.json.encode(question(20, 22, stream=True, max_tokens=50)), "chat", "", {}
    )
    facts = RequestFacts(
        provider="replayed to",
        key_id=key_id_of(registered.request_key),
        model=MODEL,
        request_id=request_id,
        lease=b"",
        expires_s=int(time.time()) + 60,
        max_tokens=50,
        kind="chat",
    )
    return serve_of(facts, wanted, seal_request(registered.request_key, facts, wanted.body)[0])


class ReplayingCoordinator:
    """Send a request twice while it runs, another one beside it, and the first once more at the end."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.said: list[FromProvider] = []
        self.over = threading.Event()

    def __call__(self, socket: ServerConnection) -> None:
        hello = self._receive(socket)
        assert isinstance(hello, ProviderHello)
        self._send(socket, CoordinatorProof(Identity.generate()).challenge(hello, []))
        registered = self._receive(socket)
        assert isinstance(registered, Register)
        one, two = _serve_of(registered, "one"), _serve_of(registered, "two")
        self._send(socket, Registered("replayed to", 32), one, one)
        self._until(socket, "one", Chunk)
        self._send(socket, two)
        self._until(socket, "two", Done)
        self._engine.go_on.set()
        self._until(socket, "one", Done)
        self._send(socket, one)
        self._until(socket, "one", Failed)
        self.over.set()

    def _until(self, socket: ServerConnection, request_id: str, kind: type[FleetMessage]) -> None:
        while True:
            message = self._receive(socket)
            if isinstance(message, Began | Chunk | Done | Failed):
                self.said.append(message)
                if isinstance(message, kind) and message.request_id == request_id:
                    return

    def _receive(self, socket: ServerConnection) -> FromProvider:
        data = socket.recv(timeout=60)
        assert isinstance(data, bytes)
        return decode_from_provider(data, MAX_MESSAGE_BYTES)

    def _send(self, socket: ServerConnection, *messages: FleetMessage) -> None:
        for message in messages:
            socket.send(encode_fleet(message))


def test_a_coordinator_that_replays_a_request_gets_one_answer() -> None:
    engine = FakeEngine()
    engine.trouble[:] = ["slow"]
    coordinator = ReplayingCoordinator(engine)
    providers: list[Provider] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def provide(dial: str, url: str) -> None:
        loops.append(asyncio.get_running_loop())
        upstream = Upstream(url)
        providers.append(Provider(Identity.generate(), upstream, ProvideOptions(dial, {MODEL: FAST})))
        await providers[0].run()
        await upstream.close()

    with engine_server(engine) as url, serve(coordinator, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dial = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"

        def drain() -> None:
            loops[0].call_soon_threadsafe(providers[0].drain)

        running = Running(lambda: asyncio.run(provide(dial, url)), drain)
        assert coordinator.over.wait(30), running.error
        running.stop()
        server.shutdown()
    ends = [
        (type(one).__name__, one.request_id) for one in coordinator.said if isinstance(one, Done | Failed)
    ]
    assert ends == [("Done", "two"), ("Done", "one"), ("Failed", "one")]
    assert "came twice" in next(one.reason for one in coordinator.said if isinstance(one, Failed))
    assert sum(isinstance(one, Began) for one in coordinator.said) == 2
    assert len(engine.bodies) == 2


# Coordinators that lie: what `test_proxy` sees them do, while others are served.


@pytest.mark.parametrize("fault", LEASES)
def test_a_coordinator_that_substitutes_keys_harms_nobody_else(blind: Blind, fault: str) -> None:
    change, reason = LEASES[fault]
    blind.hostile.lease = change
    body = question(52713391, 19282736)
    answer = httpx.post(blind.through_hostile + CHAT, json=body, timeout=30, trust_env=False)
    assert answer.status_code == 503
    assert reason in answer.json()["error"]["message"]
    assert "52713391" not in str(blind.hostile.got)
    blind.hostile.lease = lambda lease: lease  # and its proxy serves again, once it is honest
    answer = httpx.post(blind.through_hostile + CHAT, json=question(20, 22), timeout=30, trust_env=False)
    assert answer.json()["choices"][0]["message"]["content"] == "42"


def test_a_coordinator_that_strips_blindness_harms_nobody_else(blind: Blind) -> None:
    blind.hostile.sealed_answer = JSONResponse({"choices": [{"message": {"content": "5"}}]})
    blind.hostile.headers = {"x-convoy-sealed": "by-coordinator"}
    try:
        body = question(52713391, 19282736)
        answer = httpx.post(blind.through_hostile + CHAT, json=body, timeout=30, trust_env=False)
    finally:
        blind.hostile.sealed_answer, blind.hostile.headers = None, {}
    assert (answer.status_code, "clear text" in answer.json()["error"]["message"]) == (503, True)
    assert "x-convoy-sealed" not in answer.headers
    assert "52713391" not in str(blind.hostile.got)
