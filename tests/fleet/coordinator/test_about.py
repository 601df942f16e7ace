"""The coordinator's page over HTTP: what a session sees, and how little a consumer's key does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.transcript import run_here
from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.page.rights import PageRights
from convoy.api.page.tokens import Scope
from convoy.errors import UsageError
from convoy.fleet.books.keys import Scope as KeyScope
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.sdk.client import cluster_status
from convoy.sdk.endpoint import Endpoint
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question
from support.waiting import wait_until

EVENTS = {"accept": "text/event-stream"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def fleet(tmp_path: Path, engine: FakeEngine) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path, CoordinatorOptions())
    try:
        with engine_server(engine) as url:
            made.add("one", url)
            yield made
    finally:
        made.close()


def client_of(fleet: FleetUnderTest, key: str) -> httpx.Client:
    return httpx.Client(base_url=fleet.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


def session_of(fleet: FleetUnderTest, scope: Scope) -> httpx.Client:
    token = fleet.tokens.make(fleet.port, scope)
    begun = httpx.post(f"{fleet.url}/page/session", json={"token": token}, timeout=60)
    assert begun.json() == {"scope": scope, "needs_key": True, "server": "coordinator"}
    return httpx.Client(base_url=fleet.url, cookies=begun.cookies, timeout=60)


def first_event(answer: httpx.Response) -> dict[str, Any]:
    line = next(line for line in answer.iter_lines() if line.startswith("data: "))
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return found


def test_the_page_needs_no_key_and_nothing_of_the_fleet_is_shown_without_one(fleet: FleetUnderTest) -> None:
    with httpx.Client(base_url=fleet.url, timeout=60) as stranger:
        page = stranger.get("/")
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith(
            "default-src 'self'; frame-ancestors 'none'"
        )
        assert stranger.get("/page/static/fleet.js").status_code == 200
        assert stranger.head("/").status_code == 200
        for path in ("/status", "/page/session", "/v1/models"):
            assert stranger.get(path).status_code == 401, path
        assert stranger.post("/page/session", json={"token": "o" + "x" * 43}).status_code == 401
        assert stranger.delete("/page/sessions").status_code == 403
        site = {"origin": "https://evil.example"}
        assert stranger.get("/status", headers=site).status_code == 403
        assert stranger.get("/", headers={"host": "evil.example"}).status_code == 403


def test_a_session_sees_the_providers_and_no_text_and_asks_no_model(fleet: FleetUnderTest) -> None:
    with fleet.client() as ann, session_of(fleet, "view") as viewer:
        assert ann.post("/v1/chat/completions", json=question(20, 22)).status_code == 200
        wait_until(lambda: viewer.get("/status").json()["record"]["outcomes"] == {"complete": 1})
        answer = viewer.get("/status")
        found = answer.json()
        (one,) = found["record"]["providers"]
        assert (one["name"], one["level"], one["identity"]) == ("one", "none", fleet.identities[0].hex())
        assert (one["answers"], one["failures"], one["models"]) == (1, 0, {MODEL: 0})
        places = one["places"][MODEL]
        assert (places["slots"], places["taken_elsewhere"], places["on_trial"]) == (4, 0, False)
        assert (found["generated_tokens"], found["prompt_tokens"]) == (2, len("What is 20+22?"))
        assert found["offered"][0]["free_slots"] == 4
        for secret in ("What is", "20+22", "42?", "ann", fleet.key):
            assert secret not in answer.text
        assert viewer.post("/v1/chat/completions", json=question(1, 2)).status_code == 401
        assert viewer.delete("/page/sessions").status_code == 403


def test_a_key_sees_the_requests_of_its_account_alone_and_never_operates(
    fleet: FleetUnderTest, engine: FakeEngine
) -> None:
    fleet.ledger.open_account("bob")
    bobs = fleet.directory.make_key(KeyScope.CONSUMER, "bob")
    engine.trouble = ["slow"]
    with (
        fleet.client() as ann,
        client_of(fleet, bobs) as bob,
        session_of(fleet, "operate") as operator,
        ann.stream("POST", "/v1/chat/completions", json=question(20, 22, stream=True)) as answer,
    ):
        assert answer.status_code == 200
        own, others, whole = (one.get("/status").json() for one in (ann, bob, operator))
        assert (own["running"], others["running"], whole["running"]) == (1, 0, 1)
        assert own["record"] is others["record"] is None
        # The free places would tell one account that another one asks.
        assert others["offered"][0]["free_slots"] is None
        engine.go_on.set()
        answer.read()
        wait_until(lambda: ann.get("/status").json()["generated_tokens"] == 2)
        assert bob.get("/status").json()["generated_tokens"] == 0
        assert bob.get("/page/session").json()["scope"] == "use"
        assert bob.delete("/page/sessions").status_code == 403
        assert operator.delete("/page/sessions").json() == {"ended": 1}
        assert operator.get("/status").status_code == 401
    with client_of(fleet, fleet.admin_key) as admin:
        assert admin.get("/status").status_code == 403


def test_a_provider_that_fails_is_on_trial_and_one_that_leaves_is_gone(
    fleet: FleetUnderTest, engine: FakeEngine
) -> None:
    engine.trouble = ["cut"]
    with fleet.client() as ann, session_of(fleet, "view") as viewer:
        ann.post("/v1/chat/completions", json=question(20, 22, stream=True))

        def record() -> dict[str, Any]:
            found: dict[str, Any] = viewer.get("/status").json()["record"]
            return found

        wait_until(lambda: record()["providers"][0]["failures"] == 1)
        assert record()["providers"][0]["places"][MODEL]["on_trial"]
        fleet.stop_provider(0)
        wait_until(lambda: record()["num_providers"] == 0)
        (gone,) = record()["gone"]
        # It drained first.
        assert (gone["name"], gone["how"]) == ("one", "left")
        assert record()["num_lost"] == 0


def test_providers_that_an_administrator_removes_are_counted_apart_from_lost_ones(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(prove_every_s=0.1))
    try:
        with engine_server(FakeEngine()) as url, session_of(fleet, "view") as viewer, fleet.admin() as admin:
            for name in ("here", "elsewhere"):
                fleet.add(name, url, heartbeat_s=0.1)
            admin.post("/providers/revoke", json={"name": "here"}).raise_for_status()
            # As another coordinator of this database does.
            fleet.directory.revoke_provider("elsewhere")
            wait_until(lambda: viewer.get("/status").json()["record"]["num_removed"] == 2)
            record = viewer.get("/status").json()["record"]
        assert {one["name"]: one["how"] for one in record["gone"]} == {
            "here": "removed",
            "elsewhere": "removed",
        }
        assert record["num_lost"] == 0
    finally:
        fleet.close()


def test_an_account_sees_how_many_of_its_own_requests_wait_and_no_others(
    fleet: FleetUnderTest, engine: FakeEngine
) -> None:
    fleet.ledger.open_account("bob")
    bobs = fleet.directory.make_key(KeyScope.CONSUMER, "bob")
    engine.trouble = ["slow"] * 5
    with (
        ThreadPoolExecutor(6) as pool,
        fleet.client() as ann,
        client_of(fleet, bobs) as bob,
        session_of(fleet, "view") as viewer,
    ):
        slow = question(20, 22, stream=True)
        # Four run, and the others wait.
        asked = [pool.submit(ann.post, "/v1/chat/completions", json=slow) for _ in range(6)]
        wait_until(lambda: viewer.get("/status").json()["waiting"] == 2)
        for client, own in ((ann, 2), (bob, 0)):
            found = client.get("/status").json()
            assert (found["waiting"], found["offered"][0]["waiting"]) == (own, own)
            assert client.get("/v1/models").json()["data"][0]["waiting"] == own
            assert client.get(f"/v1/models/{MODEL}").json()["waiting"] == own
        assert viewer.get("/status").json()["offered"][0]["waiting"] == 2
        engine.go_on.set()
        assert [one.result().status_code for one in asked] == [200] * 6


def test_a_provider_that_is_not_approved_waits_in_sight_and_is_refused(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(approval_s=1.0))
    try:
        fleet.add("two", "http://127.0.0.1:9", approved=False)
        key = fleet.identities[0].hex()
        with session_of(fleet, "view") as viewer:
            wait_until(lambda: viewer.get("/status").json()["record"]["unapproved"] == [key])
            wait_until(lambda: bool(viewer.get("/status").json()["record"]["refusals"]))
            found = viewer.get("/status").json()
        assert key in found["record"]["refusals"][0]["reason"]
        assert (found["ready"], found["reason"]) == (False, "no provider is connected")
    finally:
        fleet.close()


def test_the_commands_of_an_administrator_list_a_provider_that_waits_with_its_key(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions())
    try:
        fleet.add("gone", "http://127.0.0.1:9")
        fleet.add("new", "http://127.0.0.1:9", approved=False)
        gone, new = (identity.hex() for identity in fleet.identities)
        with fleet.admin() as admin:
            wait_until(lambda: admin.get("/status").json()["unapproved"] == [new])
            assert {one["identity"]: one["state"] for one in admin.get("/providers").json()} == {
                gone: "connected",
                new: "waiting",
            }
            admin.post("/providers/revoke", json={"name": "gone"}).raise_for_status()
            # Its process dials again at once.
            wait_until(lambda: len(admin.get("/status").json()["unapproved"]) == 2)
        flags = ("--admin-url", fleet.admin_url, "--admin-key-file", "admin.key")
        (tmp_path / "admin.key").touch(mode=0o600)
        (tmp_path / "admin.key").write_text(fleet.admin_key)
        for command in ("status", "providers"):
            done = run_here(["coordinator", command, *flags], tmp_path)
            assert f"\n  convoy coordinator providers --approve {new} NAME\n" in done.stderr, command
        rows = [line.split()[:3] for line in done.stdout.splitlines()]
        assert rows == [["name", "state", "identity"], ["gone", "waiting", gone], ["-", "waiting", new]]
    finally:
        fleet.close()


def test_a_streamed_status_ends_once_its_key_is_revoked(fleet: FleetUnderTest) -> None:
    with fleet.client() as ann, ann.stream("GET", "/status", headers=EVENTS) as answer:
        lines = answer.iter_lines()
        assert '"record":null' in next(line for line in lines if line.startswith("data: "))
        fleet.directory.revoke_key("ann", fleet.key.removeprefix("convoy-")[:4])
        assert not [line for line in lines if line.startswith("data: ")]


def test_a_session_streams_the_whole_status(fleet: FleetUnderTest) -> None:
    with session_of(fleet, "view") as viewer, viewer.stream("GET", "/status", headers=EVENTS) as answer:
        assert first_event(answer)["record"]["num_providers"] == 1


def test_the_command_for_a_head_says_that_this_is_a_coordinator(fleet: FleetUnderTest) -> None:
    with pytest.raises(UsageError, match="is a coordinator"):
        cluster_status(Endpoint(fleet.url, fleet.key))


def test_the_cookie_is_secure_where_a_proxy_ends_tls() -> None:
    scope = {"server": ("127.0.0.1", 8780)}
    behind = PageRights(ServeOptions(page=PageOptions(behind_tls_proxy=True)))
    assert behind.cookie(scope, "x") == "__Host-convoy-8780=x; Path=/; HttpOnly; SameSite=Strict; Secure"
    # The part between the proxy and a listener off loopback would be in clear.
    assert PageRights(ServeOptions(host="192.0.2.7", page=PageOptions(behind_tls_proxy=True))).why_not
