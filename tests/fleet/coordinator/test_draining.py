from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from convoy.crypto.sealed.request import seal_request
from convoy.fleet.consumer_request import ModelOptions, read_consumer_request
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.lease import SEALED_TYPE, Lease, facts_of, read_lease
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question
from support.waiting import wait_until

ASKED = {
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


def test_a_coordinator_that_drains_says_so_and_answers_the_lease_that_it_gave(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    with engine_server(FakeEngine()) as url, fleet.client() as client, fleet.admin() as admin:
        fleet.add("one", url)
        lease = read_lease(client.post("/v1/leases", json=ASKED).content, Lease)
        wanted = read_consumer_request(msgspec.json.encode(question(20, 22, max_tokens=50)), "chat", "", {})
        sealed, _ = seal_request(lease.request_key, facts_of(lease, wanted), wanted.body)
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(fleet.coordinator.stop)
            wait_until(lambda: bool(admin.get("/status").json()["draining"]))
            assert client.post("/v1/leases", json=ASKED).status_code == 503
            headers = {"content-type": SEALED_TYPE}
            assert (
                client.post(f"/v1/leases/{lease.lease}", content=sealed, headers=headers).status_code == 200
            )
            stopped.result()
        fleet.stop_provider(0)


def test_who_waits_for_a_provider_is_told_at_once_that_there_will_be_none(tmp_path: Path) -> None:
    options = CoordinatorOptions(instance="test", models={MODEL: ModelOptions()})
    fleet = FleetUnderTest(tmp_path, options)
    with fleet.client() as client, fleet.admin() as admin, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/v1/chat/completions", json=question(1, 2))
        wait_until(lambda: sum(one["waiting"] for one in admin.get("/status").json()["models"]) == 1)
        fleet.coordinator.stop()
        answer = waiting.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("the coordinator is shutting down")
    assert fleet.ledger.check() == []
    assert fleet.ledger.balance("ann") == 10**12


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_ends_with_an_error(tmp_path: Path, stream: bool) -> None:
    fleet, engine = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test")), FakeEngine()
    with engine_server(engine) as url, fleet.client() as client, ThreadPoolExecutor(1) as pool:
        fleet.add("one", url)
        engine.trouble.append("slow")
        body = question(20, 22, stream=stream)
        answering = pool.submit(client.post, "/v1/chat/completions", json=body)
        wait_until(lambda: bool(engine.bodies))
        fleet.stop.request()
        fleet.coordinator.stop()  # a second time: at once
        answer = answering.result()
        engine.go_on.set()
        fleet.stop_provider(0)
    if stream and answer.status_code == 200:
        assert "shut down before the answer was complete" in answer.text
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 503
        assert "shut down before the answer was complete" in answer.json()["error"]["message"]
    assert fleet.ledger.check() == []
