from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.api.listen.options import ServeOptions
from convoy.crypto.identity import Identity
from convoy.errors import ConfigError, PeerRefused, ProviderError
from convoy.fleet.capacity import Load
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.routing.providers import ProviderTable
from convoy.fleet.coordinator.server import ListenOptions
from convoy.fleet.provider.greeting import CoordinatorUnproved
from convoy.fleet.provider.provide import ProvideOptions, Provider
from convoy.fleet.provider.upstream import Upstream
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question, streamed
from support.tls_files import make_tls_files
from support.waiting import wait_until

HERE = ServeOptions(allow_unauthenticated=True)


@pytest.mark.parametrize("url", ["ws://example.org", "http://127.0.0.1", "wss://", "", "ws://10.0.0.1:80"])
def test_a_coordinator_is_dialled_over_tls_or_on_this_machine(url: str) -> None:
    with pytest.raises(ConfigError):
        ProvideOptions(url, {}).check()
    for good in ("wss://example.org", "ws://127.0.0.1:1", "ws://localhost:1", "ws://[::1]:1"):
        ProvideOptions(good, {}).check()


@pytest.mark.parametrize(
    "place", ["127.0.0.1:99999", "127.0.0.1:0", "host:abc", "[::1", f"{'a' * 64}.example", "a..example"]
)
def test_a_place_that_cannot_be_dialled_is_told_without_the_user_in_it(place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProvideOptions(f"wss://ann:sec@ret@{place}", {}).check()
    assert caught.value.message == f"the coordinator 'wss://{place}' is no URL of a WebSocket"
    assert caught.value.hint == (
        "wss://HOST[:PORT], or ws://127.0.0.1:PORT for a coordinator on this machine"
    )


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://127.0.0.1:8780", "did you mean ws://127.0.0.1:8780?"),
        ("https://ann:secret@fleet.example", "did you mean wss://fleet.example?"),
        ("https://ann:secret/@fleet.example", "did you mean wss://fleet.example?"),
        ("127.0.0.1:8780", "wss://HOST[:PORT], or ws://127.0.0.1:PORT for a coordinator on this machine"),
    ],
)
def test_a_url_that_is_none_of_a_websocket_gets_the_one_that_was_meant(url: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProvideOptions(url, {}).check()
    assert caught.value.hint == hint
    assert "secret" not in caught.value.message


def test_a_server_that_takes_no_providers_is_told_with_its_status_and_tried_again(tmp_path: Path) -> None:
    async def provide(url: str) -> list[str]:
        told: list[str] = []
        options = ProvideOptions(url.replace("http", "ws", 1), {}, events=told.append)
        upstream = Upstream(url)
        provider = Provider(Identity.generate(), upstream, options)
        running = asyncio.ensure_future(provider.run())
        while not told:
            await asyncio.sleep(0.001)
        assert not running.done()
        provider.drain()
        await running
        await upstream.close()
        return told

    with engine_server(FakeEngine()) as url:
        told = asyncio.run(provide(url))
    assert told == [
        "the coordinator cannot be reached, and is tried again: a server answers there with HTTP 404, "
        "expected 101 from a coordinator"
    ]


def test_a_coordinator_listens_over_tls_or_on_this_machine(tmp_path: Path) -> None:
    away = ServeOptions(host="0.0.0.0", allow_unauthenticated=True)  # noqa: S104 - that is what is refused
    with pytest.raises(ConfigError, match="without TLS"):
        ListenOptions(away, HERE).check()
    with pytest.raises(ConfigError, match="must be on loopback"):
        ListenOptions(HERE, away).check()
    ListenOptions(replace(away, tls=make_tls_files(tmp_path)), HERE).check()
    ListenOptions(away, HERE, behind_tls_proxy=True).check()


def test_a_provider_that_drains_ends_what_it_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    engine, other = FakeEngine(), FakeEngine()
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    try:
        with (
            engine_server(engine) as url,
            engine_server(other) as other_url,
            ThreadPoolExecutor(2) as pool,
            fleet.client() as client,
        ):
            fleet.add("one", url)
            engine.trouble = ["slow"]
            asked = pool.submit(client.post, "/v1/chat/completions", json=question(20, 22, stream=True))
            wait_until(lambda: engine.bodies)
            ended = pool.submit(fleet.stop_provider, 0)
            with fleet.admin() as admin:
                wait_until(lambda: admin.get("/status").json()["providers"][0]["draining"])
            fleet.add("two", other_url)
            assert client.post("/v1/chat/completions", json=question(1, 2)).status_code == 200
            assert len(engine.bodies) == 1
            engine.go_on.set()
            assert streamed(asked.result().text) == "42."
            ended.result()
    finally:
        fleet.close()


def test_a_provider_with_an_old_key_ends_what_runs_before_it_comes_back_with_another(tmp_path: Path) -> None:
    is_old = threading.Event()

    async def key_is_old(_made_s: float) -> None:
        while not is_old.is_set():
            await asyncio.sleep(0.01)
        is_old.clear()

    fleet, engine = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test")), FakeEngine()
    try:
        with engine_server(engine) as url, ThreadPoolExecutor(1) as pool, fleet.client() as client:
            fleet.add("one", url, key_is_old=key_is_old)
            engine.trouble = ["slow"]
            asked = pool.submit(client.post, "/v1/chat/completions", json=question(20, 22, stream=True))
            wait_until(lambda: engine.bodies)
            is_old.set()
            with fleet.admin() as admin:
                wait_until(lambda: admin.get("/status").json()["providers"][0]["draining"])
            engine.go_on.set()
            assert streamed(asked.result().text) == "42."
            fleet.wait_registered()
            assert client.post("/v1/chat/completions", json=question(1, 2)).status_code == 200
            one, two = (body["cache_salt"] for body in engine.bodies)
            assert one == two  # the account's
    finally:
        fleet.close()


def test_a_pinned_coordinator_is_the_only_one_that_is_registered_with(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    try:
        fleet.add("pinned", "http://127.0.0.1:1", coordinator_key=fleet.identity.public_key)
        with pytest.raises(AssertionError):
            fleet.add("other", "http://127.0.0.1:1", coordinator_key=bytes(32), wait_s=1.0)
        assert isinstance(fleet.error_of(-1), CoordinatorUnproved)
    finally:
        fleet.close()


def test_an_engines_rates_are_measured_and_its_absence_is_said() -> None:
    async def measure(url: str) -> None:
        upstream = Upstream(url)
        try:
            models = await upstream.models()
            assert models == {MODEL: 4096}
        finally:
            await upstream.close()

    with engine_server(FakeEngine()) as url:
        asyncio.run(measure(url + "/v1/"))
    with pytest.raises(ProviderError, match=rf"the engine at {url}/? does not answer: connection refused"):
        asyncio.run(measure(url))
    with pytest.raises(ConfigError):
        Upstream("example.org")


def test_a_provider_that_is_not_approved_yet_says_so_once_and_who_can_mend_it(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    try:
        fleet.add("new", "http://127.0.0.1:1", approved=False)
        wait_until(lambda: fleet.events)
        key = fleet.identities[0].hex()
        command = f"convoy coordinator providers --approve {key} NAME"
        assert fleet.events == [f"new: waiting for approval: on the coordinator's machine, {command}"]
        fleet.directory.approve(fleet.identities[0], "new")
        fleet.wait_registered()
        assert fleet.events[1:] == ["new: registered as new"]
    finally:
        fleet.close()


def test_a_provider_registers_as_soon_as_it_is_approved_without_dialling_again(tmp_path: Path) -> None:
    # no look at the database would come in time: only being woken does
    options = CoordinatorOptions(instance="test", approval_s=3600.0, approval_poll_s=3600.0)
    fleet = FleetUnderTest(tmp_path, options)
    try:
        fleet.add("new", "http://127.0.0.1:1", approved=False)
        fleet.wait_event("waiting for approval")
        with fleet.admin() as admin:
            body = {"identity": fleet.identities[0].hex(), "name": "new"}
            assert admin.post("/providers", json=body).json()["has_called"]
            fleet.wait_registered()
            key = admin.post("/keys", json={"scope": "metrics"}).json()["key"]
            scraped = admin.get("/metrics", headers={"authorization": f"Bearer {key}"}).text
        assert "convoy_fleet_registrations_refused_total 0.0" in scraped
    finally:
        fleet.close()


def test_a_provider_that_waits_for_approval_ends_at_once_when_it_drains(tmp_path: Path) -> None:
    options = CoordinatorOptions(instance="test", approval_s=3600.0, approval_poll_s=3600.0)
    fleet = FleetUnderTest(tmp_path, options)
    try:
        fleet.add("new", "http://127.0.0.1:1", approved=False)
        fleet.wait_event("waiting for approval")
        fleet.stop_provider(0)
    finally:
        fleet.close()


def test_a_heartbeat_says_what_the_engine_gave_each_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Load] = []
    note_load = ProviderTable.note_load

    def heard(self: ProviderTable, name: str, load: Load) -> None:
        said.append(load)
        note_load(self, name, load)

    monkeypatch.setattr(ProviderTable, "note_load", heard)
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    engine = FakeEngine()
    try:
        with engine_server(engine) as url, ThreadPoolExecutor(1) as pool, fleet.client() as client:
            fleet.add("one", url, heartbeat_s=0.1)
            engine.trouble = ["slow"]
            body = question(10**15, 1, stream=True)  # sixteen digits, and a wait after the first
            asked = pool.submit(client.post, "/v1/chat/completions", json=body)
            wait_until(lambda: engine.bodies)
            wait_until(lambda: any(load.free_slots == 3 for load in said))
            count = len(said)
            wait_until(lambda: len(said) > count + 2)  # so that it decoded for a while
            assert not any(load.decode_rate for load in said)
            engine.go_on.set()
            assert streamed(asked.result().text) == f"{10**15 + 1}."
            wait_until(lambda: any(load.decode_rate for load in said))
            rates = [load for load in said if load.decode_rate]
            assert rates[0].decode_rate < 16 / 0.05
            assert rates[0].streams == pytest.approx(1.0)
            wait_until(lambda: said[-1].decode_rate == 0)  # and after a while nothing of it
    finally:
        fleet.close()


def test_a_second_process_with_the_same_key_ends_the_first_with_the_cause(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    try:
        shared = Identity.generate()
        fleet.add("one", "http://127.0.0.1:1", identity=shared)
        fleet.add("one", "http://127.0.0.1:1", identity=shared)
        ended = fleet.error_of(0)
        assert isinstance(ended, PeerRefused)
        assert ended.message == "the coordinator says: another process uses this provider's key"
        assert ended.hint is not None
        assert "--dir" in ended.hint
        assert fleet.events == ["one: registered as one"] * 2, "the second one serves on"
    finally:
        fleet.close()


@pytest.mark.parametrize("name", ["", "a b", "../../x", "<img src=x onerror=x>", "a\x1b[31m", "x" * 64])
def test_a_name_that_cannot_stand_in_logs_and_headers_is_refused_at_approval(
    tmp_path: Path, name: str
) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    try:
        with fleet.admin() as admin:
            answer = admin.post("/providers", json={"identity": "ab" * 32, "name": name})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith(f"{name!r} cannot name a provider: 1 to 63 letters")
        assert "--approve KEY alpha" in str(error)
        assert fleet.directory.providers() == []
    finally:
        fleet.close()
