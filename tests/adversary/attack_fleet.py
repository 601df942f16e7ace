"""What relays, providers, consumers and pages of other sites try against a fleet."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.sync.server import serve
from websockets.typing import Origin

from adversary.ledger import Row
from convoy.errors import RequestError
from convoy.fleet.coordinator.bounds import BilledOutcome
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.provider.greeting import CoordinatorUnproved
from fleet.coordinator.test_bounds import BODY, charged
from fleet.coordinator.test_bounds import OPTIONS as PRICED
from fleet.provider.test_allowed import CHAT, REFUSED, passed_on
from fleet.provider.test_greeting import ANSWERS, NOWHERE, PINNED, Impostor
from support.fleet import FakeEngine, FleetUnderTest, engine_server, question
from support.tls import TestAuthority, TlsRelay

OPTIONS = CoordinatorOptions(instance="test")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, authority: TestAuthority) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path_factory.mktemp("fleet"), OPTIONS, tls=authority.issue("own"))
    yield made
    made.close()


@pytest.mark.attack("a relay between a provider and its coordinator", layer="fleet")
@pytest.mark.parametrize("try_number", range(3))
def test_a_relay_gets_no_registration(
    fleet: FleetUnderTest, authority: TestAuthority, row: Row, try_number: int
) -> None:
    relay = TlsRelay(authority.issue(f"relay{try_number}"), ("127.0.0.1", fleet.port), authority.trusting())
    dial, key = f"wss://127.0.0.1:{relay.port}", fleet.identity.public_key
    fleet.add("relayed", NOWHERE, approved=False, dial=dial, tls=authority.trusting, coordinator_key=key)
    error = fleet.error_of(-1)
    row.tried(type(error).__name__)
    assert isinstance(error, CoordinatorUnproved)
    assert fleet.identities[-1] not in relay.sent
    relay.close()


@pytest.mark.attack("an impostor that answers a provider's hello", layer="fleet")
@pytest.mark.parametrize("answer", [one for one in ANSWERS if one != "an echo"])
def test_an_impostor_gets_no_registration(fleet: FleetUnderTest, row: Row, answer: str) -> None:
    impostor = Impostor(ANSWERS[answer])
    with serve(impostor, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dial = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        fleet.add("fooled", NOWHERE, approved=False, dial=dial, coordinator_key=PINNED.public_key)
        error = fleet.error_of(-1)
        row.tried(type(error).__name__)
        assert isinstance(error, CoordinatorUnproved)
        assert impostor.heard == []
        server.shutdown()


@pytest.mark.attack("a provider's own challenge, reflected", layer="fleet")
def test_an_echo_gets_no_registration(fleet: FleetUnderTest, row: Row) -> None:
    impostor = Impostor(ANSWERS["an echo"])
    with serve(impostor, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dial = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        fleet.add("echoed", NOWHERE, approved=False, dial=dial, coordinator_key=PINNED.public_key)
        fleet.wait_event("are not one of its messages")
        row.tried("FrameError")
        assert impostor.heard == []
        fleet.stop_provider(-1)
        server.shutdown()


@pytest.mark.attack("a provider that bills what it was not sent and did not give", layer="fleet")
@pytest.mark.parametrize(
    "said", [BilledOutcome(1 << 39, 1), BilledOutcome(1, 1 << 39), BilledOutcome(1 << 39, 1 << 39)]
)
def test_a_greedy_provider_gets_no_more_than_passed(tmp_path: Path, row: Row, said: BilledOutcome) -> None:
    fleet = FleetUnderTest(tmp_path, PRICED)
    paid = charged(fleet, BODY, said)
    fleet.close()
    row.tried("bounded")
    assert paid <= len(BODY) + 1 + 64


@pytest.mark.attack("one Idempotency-Key for many answers", layer="fleet")
def test_one_key_buys_one_answer(tmp_path: Path, row: Row) -> None:
    fleet = FleetUnderTest(tmp_path, PRICED)
    with engine_server(FakeEngine()) as url, fleet.client() as client:
        fleet.add("one", url)
        for times in range(1, 17):
            headers = {"idempotency-key": "again"}
            answer = client.post("/v1/chat/completions", json=question(20, 22), headers=headers)
            row.tried(str(answer.status_code))
            assert answer.status_code == 200
            assert 10**12 - fleet.ledger.balance("ann") == 16 * times
    fleet.close()


@pytest.mark.attack("a prompt that is tried on what a database keeps", layer="fleet")
def test_a_database_has_no_hash_that_a_prompt_can_be_tried_on(tmp_path: Path, row: Row) -> None:
    fleet = FleetUnderTest(tmp_path, PRICED)
    body = msgspec.json.encode(question(20, 22))
    with engine_server(FakeEngine()) as url, fleet.client() as client:
        fleet.add("one", url)
        for key in (None, "a key"):
            headers = {"content-type": "application/json"} | ({"idempotency-key": key} if key else {})
            assert client.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
    fleet.close()
    kept = b"".join(file.read_bytes() for file in tmp_path.glob("fleet.db*"))
    row.tried("no match")
    for said in (body, b"ann" + body, b"What is 20+22?"):
        assert hashlib.sha256(said).digest() not in kept
        assert said not in kept


@pytest.mark.attack("a request that would have an engine fetch, jump a queue or move K/V", layer="fleet")
@pytest.mark.parametrize("what", REFUSED)
def test_an_engine_gets_no_field_that_reaches_beyond_an_answer(row: Row, what: str) -> None:
    changes, _ = REFUSED[what]
    with pytest.raises(RequestError) as caught:
        passed_on({**CHAT, **changes})
    row.tried(type(caught.value).__name__)


@pytest.mark.attack("a page of another site at the providers' listener", layer="fleet")
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:8780"])
def test_a_page_gets_no_challenge(
    fleet: FleetUnderTest, authority: TestAuthority, row: Row, origin: str
) -> None:
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(f"{fleet.socket_url}/provider", origin=Origin(origin), ssl=authority.trusting()),
    ):
        pass
    row.tried(str(caught.value.response.status_code))
    assert caught.value.response.status_code == 403
