from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from convoy.crypto.sealed_request import seal_request
from convoy.fleet.asked import read_wanted
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
        wanted = read_wanted(msgspec.json.encode(question(20, 22, max_tokens=50)), "chat", "", {})
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
