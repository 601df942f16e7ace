"""Several keys at one server: limits, counts and logs of each are its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from support.fake_service import MAX_CONTEXT, FakeEngine, Running, serving
from support.scraping import Scrape, scrape

ANN, BOB, EYE = "the-secret-key-of-ann", "the-secret-key-of-bob", "the-key-of-prometheus"
ASK = {"prompt": "abc", "max_tokens": 4}


def table(name: str, key: str, more: str = "") -> str:
    return f'[[keys]]\nname = "{name}"\nkey = "{key}"\n{more}\n'


def ring_of(tmp_path: Path, *tables: str) -> KeyRing:
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    file.write_text("".join(tables), encoding="utf-8")
    return KeyRing.open(file)


def ask(server: Running, key: str, **more: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json={**ASK, **more}, headers=headers, timeout=60.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    keys = ring_of(
        tmp_path,
        table("ann", ANN, "requests_per_minute = 2"),
        table("bob", BOB, "total_tokens = 10"),
        table("eye", EYE, "metrics = true"),
    )
    with serving(options=ServeOptions(port=0, keys=keys, access_log=True)) as running:
        yield running


def test_a_limit_is_the_keys_own_and_says_when_to_come_back(server: Running) -> None:
    assert [ask(server, ANN).status_code for _ in range(3)] == [200, 200, 429]
    refused = ask(server, ANN)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "used 2 requests in the last minute, and it may use 2" in refused.json()["error"]["message"]
    assert ask(server, BOB).status_code == 200
    spent = ask(server, BOB)
    assert (spent.status_code, spent.json()["error"]["code"]) == (402, "insufficient_quota")
    assert len(server.engine.handles) == 3


def test_nothing_of_another_key_is_in_what_a_key_reads(server: Running) -> None:
    ask(server, ANN), ask(server, BOB)
    own, all_of_it = scrape(f"{server.url}/metrics", ANN), scrape(f"{server.url}/metrics", EYE)
    assert own("convoy_key_requests_total", key="ann") == 1
    assert "bob" not in own.text
    assert all_of_it("convoy_key_tokens_total", key="bob", kind="prompt") == 3
    assert all_of_it("convoy_key_tokens_total", key="bob", kind="completion") == 4
    assert all_of_it("convoy_key_running", key="bob") == 0
    for key in (ANN, BOB, EYE):
        assert key not in all_of_it.text
        status = httpx.get(f"{server.url}/status", headers={"x-api-key": key})
        assert status.json() == {"model": "fake", "ready": True, "stages": []}


def test_refusals_and_wrong_keys_are_counted(server: Running) -> None:
    for _ in range(3):
        ask(server, ANN)
    assert ask(server, "no-key-of-this-server").status_code == 401
    httpx.get(f"{server.url}/v1/models")
    found = scrape(f"{server.url}/metrics", EYE)
    assert found("convoy_key_refusals_total", key="ann", limit="requests_per_minute") == 1
    assert found("convoy_http_failed_keys_total", reason="wrong") == 1
    assert found("convoy_http_failed_keys_total", reason="none") == 1


def test_the_log_has_the_keys_name(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask(server, ANN)
    server.stop.request()
    server.thread.join(20.0)
    said = [one.getMessage() for one in caplog.records if one.name.startswith("convoy")]
    assert any(line.startswith("access ") and " key=ann " in line for line in said)
    assert any(line.startswith("generation ") and " key=ann " in line for line in said)
    assert ANN not in "\n".join(said)


def test_names_share_no_prefix_and_a_key_keeps_its_own(server: Running) -> None:
    ask(server, ANN), ask(server, BOB), ask(server, ANN)
    ann, bob, again = (handle.request.cache_salt for handle in server.engine.handles)
    assert ann == again != bob
    assert ANN.encode() not in ann


def test_a_withdrawn_key_is_refused_while_its_stream_ends(tmp_path: Path) -> None:
    keys = ring_of(tmp_path, table("ann", ANN), table("bob", BOB))
    engine = FakeEngine()
    engine.pause_after = 2
    with serving(engine, ServeOptions(port=0, keys=keys)) as running:
        headers = {"authorization": f"Bearer {ANN}"}
        body = {**ASK, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, headers=headers) as stream:
            assert engine.paused.wait(20.0)
            ring_of(tmp_path, table("bob", BOB))
            running.stop.request_reload()
            while ask_models(running, ANN) != 401:
                pass
            engine.go.set()
            text = stream.read().decode()
        assert text.endswith("data: [DONE]\n\n")
        assert ask_models(running, BOB) == 200


def ask_models(server: Running, key: str) -> int:
    return httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def test_a_prompt_that_does_not_fit_is_not_looked_at_a_sixth_time(tmp_path: Path) -> None:
    keys = ring_of(tmp_path, table("ann", ANN), table("bob", BOB))
    with serving(options=ServeOptions(port=0, keys=keys)) as running:
        too_long = {"prompt": "a" * (MAX_CONTEXT + 1), "max_tokens": None}
        statuses = [ask(running, ANN, **too_long) for _ in range(6)]
        assert [one.status_code for one in statuses] == [400] * 5 + [429]
        assert statuses[0].json()["error"]["code"] == "context_length_exceeded"
        assert 1 <= int(statuses[-1].headers["retry-after"]) <= 60
        assert ask(running, BOB, **too_long).status_code == 400
        assert ask(running, ANN).status_code == 200


def test_a_server_without_keys_counts_no_keys() -> None:
    with serving() as running:
        assert httpx.post(f"{running.url}/v1/completions", json=ASK).status_code == 200
        found: Scrape = scrape(f"{running.url}/metrics")
    assert not any(name.startswith("convoy_key_") for name, _ in found.samples)
