from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import Headers

from convoy.errors import RequestError
from convoy.fleet.books.keys import Scope
from convoy.fleet.books.price import Price
from convoy.fleet.consumer_request import ModelOptions, read_consumer_request
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.requests.routed_request import hold_of
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from convoy.fleet.timing import SEGMENTS
from support.fleet import FAST, MODEL, FakeEngine, FleetUnderTest, engine_server, question, streamed
from support.waiting import wait_until

PRICE = Price(prompt_micro=1_000_000, completion_micro=2_000_000)
OPTIONS = CoordinatorOptions(
    instance="test",
    models={MODEL: ModelOptions(PRICE, 64)},
    queue=QueueLimits(50, 40, 20.0),
    first_token_s=10.0,
)
BALANCE = 10**12


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path, OPTIONS)
    yield made
    made.close()


@pytest.fixture
def served(fleet: FleetUnderTest, engine: FakeEngine) -> Iterator[FleetUnderTest]:
    with engine_server(engine) as url:
        fleet.add("one", url)
        yield fleet


def ask(fleet: FleetUnderTest, one: int, two: int, **more: object) -> httpx.Response:
    with fleet.client() as client:
        return client.post("/v1/chat/completions", json=question(one, two, **more))


def test_a_whole_answer_comes_through_with_its_price_and_its_times(served: FleetUnderTest) -> None:
    answer = ask(served, 20, 22)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "42"
    times = msgspec.json.decode(answer.headers["x-timing"])
    assert set(times) == {f"{name}_us" for name in SEGMENTS}
    assert times["encrypt_us"] > 0
    assert times["dispatch_us"] > 0
    assert times["total_e2e_us"] >= times["first_token_us"] > 0
    assert answer.headers["x-convoy-provider"] == "one"
    # 14 bytes of prompt count as so many tokens in this engine
    assert served.ledger.balance("ann") == BALANCE - (14 + 2 * 2)


def test_a_stream_comes_through_and_ends_with_the_rest_of_its_times(served: FleetUnderTest) -> None:
    answer = ask(served, 20, 22, stream=True)
    assert streamed(answer.text) == "42."
    assert answer.headers["content-type"].startswith("text/event-stream")
    comment = answer.text.strip().rpartition("\n\n")[2]
    times = msgspec.json.decode(comment.removeprefix(": timing "))
    assert times["total_e2e_us"] >= times["first_token_us"] > 0
    assert "usage" not in answer.text  # it was not asked for
    assert "usage" in ask(served, 1, 1, stream=True, stream_options={"include_usage": True}).text


def test_a_stream_cannot_be_resumed_here(served: FleetUnderTest, engine: FakeEngine) -> None:
    with served.client() as client:
        body = question(20, 22, stream=True)
        answer = client.post("/v1/chat/completions", json=body, headers={"convoy-resumable": "true"})
        assert answer.status_code == 200
        assert b"id: " not in answer.content
        again = client.post("/v1/chat/completions", json=body, headers={"last-event-id": "1-1"})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "stream_not_found")


def test_the_coordinator_seals_what_it_sends(served: FleetUnderTest, engine: FakeEngine) -> None:
    assert ask(served, 1, 2).headers["x-convoy-sealed"] == "by-coordinator"
    assert engine.bodies[-1]["max_tokens"] == 64  # a request that names none has the model's


def test_many_at_once_are_all_served_by_few_slots(served: FleetUnderTest) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda i: ask(served, i, i, stream=i % 2 == 0), range(40)))
    assert [answer.status_code for answer in answers] == [200] * 40
    for number, answer in enumerate(answers):
        text = streamed(answer.text) if number % 2 == 0 else answer.json()["choices"][0]["message"]["content"]
        assert text.rstrip(".") == str(2 * number)
    assert served.ledger.check() == []


def test_before_the_first_token_a_provider_that_fails_is_replaced_unseen(
    fleet: FleetUnderTest, engine: FakeEngine
) -> None:
    other = FakeEngine()
    with engine_server(engine) as url, engine_server(other) as other_url:
        fleet.add("one", url)
        fleet.add("two", other_url)
        for trouble in ("busy", "broken"):
            engine.trouble = [trouble] * 3
            other.trouble = [trouble]
            answer = ask(fleet, 2, 3, stream=True)
            assert (answer.status_code, streamed(answer.text)) == (200, "5.")
            engine.trouble = other.trouble = []


def test_after_the_first_token_a_stream_that_breaks_ends_with_an_error_and_costs_nothing(
    served: FleetUnderTest, engine: FakeEngine
) -> None:
    engine.trouble = ["cut"]
    answer = ask(served, 20, 22, stream=True)
    assert streamed(answer.text) == "4!the provider failed before the answer was complete"
    assert "[DONE]" not in answer.text
    assert served.ledger.balance("ann") == BALANCE


def test_a_whole_answer_that_breaks_is_tried_again(served: FleetUnderTest, engine: FakeEngine) -> None:
    engine.trouble = ["busy", "busy"]
    assert ask(served, 20, 22).json()["choices"][0]["message"]["content"] == "42"


def test_what_an_engine_refuses_is_said_as_it_says_it(served: FleetUnderTest, engine: FakeEngine) -> None:
    engine.trouble = ["refuses"]
    answer = ask(served, 1, 2, stream=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "temperature: too hot"
    assert served.ledger.balance("ann") == BALANCE


def test_a_client_that_hangs_up_frees_the_slot_and_stops_the_engine(
    served: FleetUnderTest, engine: FakeEngine
) -> None:
    engine.trouble = ["slow"]
    with (
        served.client() as client,
        client.stream("POST", "/v1/chat/completions", json=question(20, 22, stream=True)) as answer,
    ):
        assert answer.status_code == 200
        next(answer.iter_bytes())
    assert engine.aborted.wait(10)
    engine.go_on.set()
    with ThreadPoolExecutor(4) as pool:  # all four slots are free
        assert all(one.status_code == 200 for one in pool.map(lambda i: ask(served, i, 1), range(4)))


def test_a_provider_that_goes_before_the_first_token_loses_nobody(
    fleet: FleetUnderTest, engine: FakeEngine
) -> None:
    other = FakeEngine()
    with engine_server(engine) as url, engine_server(other) as other_url, ThreadPoolExecutor(30) as pool:
        fleet.add("one", url)
        fleet.add("two", other_url)
        asked = [pool.submit(ask, fleet, i, i) for i in range(30)]
        fleet.stop_provider(0)
        assert [one.result().status_code for one in asked] == [200] * 30


def test_a_request_waits_for_a_provider_that_comes(fleet: FleetUnderTest, engine: FakeEngine) -> None:
    with engine_server(engine) as url, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, fleet, 1, 2)
        wait_until(lambda: _waiting(fleet) == 1)
        fleet.add("late", url)
        answer = asked.result()
        assert answer.status_code == 200
        assert msgspec.json.decode(answer.headers["x-timing"])["queue_wait_us"] > 0


def _waiting(fleet: FleetUnderTest) -> int:
    with fleet.admin() as admin:
        (model,) = admin.get("/status").json()["models"]
        return int(model["waiting"])


def test_a_full_queue_is_said_with_when_to_come_again(tmp_path: Path, engine: FakeEngine) -> None:
    options = CoordinatorOptions(instance="test", queue=QueueLimits(1, 1, 20.0))
    fleet = FleetUnderTest(tmp_path, options)
    try:
        with engine_server(engine) as url, ThreadPoolExecutor(8) as pool:
            fleet.add("one", url)
            engine.trouble = ["slow"] * 5
            asked = [pool.submit(ask, fleet, 10, i, stream=True) for i in range(8)]
            over = as_completed(asked)
            refused = [next(over).result() for _ in range(3)]  # four run and one waits until these are told
            engine.go_on.set()
            answers = [one.result() for one in asked]
        assert all(one.status_code == 429 for one in refused)
        assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
        assert sum(one.status_code == 200 for one in answers) == 5
    finally:
        fleet.close()


def test_after_a_whole_answer_the_same_key_is_another_request_that_is_charged(
    served: FleetUnderTest,
) -> None:
    headers = {"idempotency-key": "again"}
    with served.client() as client:
        one = client.post("/v1/chat/completions", json=question(20, 22), headers=headers)
        balance = served.ledger.balance("ann")
        two = client.post("/v1/chat/completions", json=question(20, 22), headers=headers)
        other = client.post("/v1/chat/completions", json=question(20, 23), headers=headers)
    assert one.json()["choices"] == two.json()["choices"]
    assert BALANCE - served.ledger.balance("ann") == 2 * (BALANCE - balance) > 0
    assert other.status_code == 409


def test_a_retry_of_a_stream_that_was_left_is_not_free(served: FleetUnderTest, engine: FakeEngine) -> None:
    headers, body = {"idempotency-key": "again"}, question(10**19, 1, stream=True)
    engine.trouble = ["slow"]
    with served.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as left:
            next(left.iter_raw())
        wait_until(lambda: bool(served.ledger.usage("ann")))
        engine.go_on.set()
        again = client.post("/v1/chat/completions", json=body, headers=headers)
    assert streamed(again.text) == "10000000000000000001."
    assert served.ledger.balance("ann") == BALANCE - len(f"What is {10**19}+1?") - 2 * 20
    assert served.ledger.check() == []


def test_keys_and_bodies_that_are_wrong_are_refused_with_their_status(served: FleetUnderTest) -> None:
    url = served.url + "/v1/chat/completions"
    good = {"authorization": f"Bearer {served.key}"}
    wrong = [{}, {"authorization": "Bearer no"}, {"authorization": f"Basic {served.key}"}]
    assert [httpx.post(url, json=question(1, 2), headers=one).status_code for one in wrong] == [401] * 3
    admin = {"authorization": f"Bearer {served.admin_key}"}
    assert httpx.post(url, json=question(1, 2), headers=admin).status_code == 403
    for body, status in (
        (b"{", 400),
        (b'{"model": "adder", "messages": "\xff"}', 400),
        (b"[]", 400),
        (b'{"messages": []}', 400),
        (b'{"model": "nobody", "messages": []}', 404),
        (b'{"model": "adder", "messages": [], "max_tokens": -2}', 400),
        (b'{"model": "adder", "messages": [], "max_tokens": 1e400}', 400),
        (b'{"model": "adder", "messages": [], "n": 100000}', 400),
        (b" " * (8 * 1024 * 1024 + 1), 413),
    ):
        answer = httpx.post(url, content=body, headers={**good, "content-type": "application/json"})
        assert answer.status_code == status, body[:50]
    assert served.ledger.balance("ann") == BALANCE
    answer = httpx.post(served.admin_url + "/credits", content=b'{"account": "\xff"}', headers=admin)
    assert (answer.status_code, "not UTF-8" in answer.text) == (400, True)


def test_a_strangers_body_is_not_waited_for(served: FleetUnderTest) -> None:
    for path in ("/v1/chat/completions", "/v1/leases"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as stranger:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            stranger.sendall(head.encode() + b"content-length: 60000\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.1 401")


def test_a_request_that_could_cost_more_than_any_account_has_is_the_clients_mistake() -> None:
    priced = CoordinatorOptions(models={MODEL: ModelOptions(Price(0, 10**15))})
    coordinator: Any = SimpleNamespace(options=priced)
    wanted = read_consumer_request(
        msgspec.json.encode(question(1, 2, max_tokens=1 << 20, n=128)), "chat", "ann", {}
    )
    with pytest.raises(RequestError, match="would cost"):
        hold_of(coordinator, "ann", wanted, bytes(32), Headers())


def test_an_account_without_balance_is_told_so(served: FleetUnderTest) -> None:
    served.ledger.open_account("poor")
    key = served.directory.make_key(Scope.CONSUMER, "poor")
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(served.url + "/v1/chat/completions", json=question(1, 2), headers=headers)
    assert answer.status_code == 402
    times = msgspec.json.decode(answer.headers["x-timing"])
    assert set(times) == {f"{name}_us" for name in SEGMENTS}, "a refusal has its times too"
    assert times["parse_us"] > 0
    assert times["dispatch_us"] == 0
    assert "poor has 0" in answer.json()["error"]["message"]


def test_a_coordinator_that_starts_again_finds_its_providers_and_its_money(
    served: FleetUnderTest,
) -> None:
    ask(served, 20, 22)
    balance, port = served.ledger.balance("ann"), served.port
    served.coordinator.stop()
    served.start(port)
    served.wait_registered()
    assert served.ledger.balance("ann") == balance
    assert ask(served, 2, 2).json()["choices"][0]["message"]["content"] == "4"


def test_a_provider_that_is_none_is_not_put_out_in_silence(served: FleetUnderTest) -> None:
    with served.admin() as admin:
        refused = admin.post("/providers/revoke", json={"name": "nobody"})
        assert refused.status_code == 400
        assert "no provider that may connect is called 'nobody'" in refused.json()["error"]["message"]
        for identity, has_called in ((served.identities[0], True), (bytes(32), False)):
            name = "one" if has_called else "early"
            said = admin.post("/providers", json={"identity": identity.hex(), "name": name}).json()
            assert said == {"name": name, "has_called": has_called}
        assert admin.post("/providers/revoke", json={"name": "early"}).json()["revoked"]


def test_administrators_have_a_listener_and_keys_of_their_own(served: FleetUnderTest) -> None:
    with served.admin() as admin, served.client() as client:
        status = admin.get("/status").json()
        assert status["providers"][0]["name"] == "one"
        assert status["models"] == [{"model": MODEL, "providers": 1, "free_slots": 4, "waiting": 0}]
        assert client.get("/status").json()["record"] is None
        assert client.get("/keys").status_code == 404
        consumer = {"authorization": f"Bearer {served.key}"}
        assert admin.get("/status", headers=consumer).status_code == 403
        made = admin.post("/keys", json={"scope": "consumer", "account": "ann"}).json()
        fresh = {"authorization": f"Bearer {made['key']}"}
        assert client.get("/v1/models", headers=fresh).status_code == 200
        assert admin.post("/keys/revoke", json={"account": "ann", "hint": made["key"][7:11]}).json() == {
            "revoked": 1
        }
        assert client.get("/v1/models", headers=fresh).status_code == 401
        for path, body in (
            ("/credits", {"account": "ann", "amount_micro": -1}),
            ("/credits", {"account": "ann", "amount_micro": 1 << 60}),
            ("/credits", {"account": "nobody", "amount_micro": 1}),
            ("/accounts", {"name": "ann"}),
            ("/providers", {"identity": "xyz", "name": "n"}),
        ):
            assert admin.post(path, json=body).status_code == 400
        ask(served, 20, 22)
        (usage,) = admin.get("/usage").json()
        assert (usage["requests"], usage["completion_tokens"]) == (1, 2)
        assert admin.post("/providers/revoke", json={"name": "one"}).json() == {
            "revoked": True,
            "was_connected": True,
        }
        assert admin.get("/status").json()["providers"] == []


def test_slots_are_what_the_provider_offers(fleet: FleetUnderTest, engine: FakeEngine) -> None:
    with engine_server(engine) as url, fleet.admin() as admin:
        fleet.add("wide", url, replace(FAST, slots=9))
        assert admin.get("/status").json()["models"][0]["free_slots"] == 9


def test_the_coordinators_own_key_is_no_providers(served: FleetUnderTest) -> None:
    body = {"identity": served.identity.public_key.hex(), "name": "itself"}
    headers = {"authorization": f"Bearer {served.admin_key}"}
    answer = httpx.post(f"{served.admin_url}/providers", json=body, headers=headers)
    assert (answer.status_code, "coordinator's own key" in answer.text) == (400, True)
