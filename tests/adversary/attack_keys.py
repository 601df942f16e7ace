"""Strangers and greedy tenants at the HTTP server of a head: keys, hosts, origins, limits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adversary.ledger import Row
from convoy.api.keys.key_file import parse_keys, read_key_file
from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.api.refusals import WrongKey
from convoy.errors import ConfigError
from support.fake_service import MAX_CONTEXT, FakeEngine, Running, serving
from support.scraping import scrape

LAYER = "HTTP"
ANN, BOB = "the-secret-key-of-ann", "the-secret-key-of-bob"
KEYS = f"""
[[keys]]
name = "ann"
key = "{ANN}"
requests_per_minute = 500
concurrent_requests = 2
total_tokens = 2000
[[keys]]
name = "bob"
key = "{BOB}"
"""
EXAMPLES = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ASK = {"prompt": "abc", "max_tokens": 4}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(KEYS, encoding="utf-8")
    return file


@pytest.fixture
def server(keys_file: Path) -> Iterator[Running]:
    with serving(options=ServeOptions(port=0, keys=KeyRing.open(keys_file))) as running:
        yield running


def ask(server: Running, key: str, **more: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json={**ASK, **more}, headers=headers, timeout=90.0)


@pytest.mark.attack("guessed API keys", layer=LAYER)
@EXAMPLES
@given(data=st.data())
def test_no_guess_is_let_in(row: Row, data: st.DataObject) -> None:
    ring = KeyRing.of(ANN)
    guess = data.draw(
        st.one_of(st.text(max_size=300), st.sampled_from([ANN[:-1], f"{ANN} ", ANN.upper(), f"\0{ANN}"]))
    )
    if guess == ANN:
        return
    with pytest.raises(WrongKey) as caught:
        ring.find(guess)
    row.tried(type(caught.value).__name__)
    assert str(caught.value) == "the api key is not right"


@pytest.mark.attack("wrong keys from one address, beside a right one", layer=LAYER)
def test_a_flood_of_wrong_keys_slows_no_right_one(server: Running, row: Row) -> None:
    over, seen = threading.Event(), []

    def guess() -> None:
        while not over.is_set():
            seen.append(ask(server, "a-wrong-key-of-a-stranger").status_code)

    guessers = [threading.Thread(target=guess) for _ in range(8)]
    for thread in guessers:
        thread.start()
    try:
        while len(seen) < 40:
            assert ask(server, BOB).status_code == 200
    finally:
        over.set()
        for thread in guessers:
            thread.join(90.0)
    row.tries += len(seen) - 1
    row.tried("refused; a right key is answered meanwhile")
    assert set(seen) <= {401, 429}
    assert 401 in seen
    found = scrape(f"{server.url}/metrics", BOB)
    assert found("convoy_http_failed_keys_total", reason="wrong") == len(seen)


@pytest.mark.attack("one tenant over its limits", layer=LAYER)
def test_a_greedy_tenant_is_held_to_its_limits_and_others_are_not(keys_file: Path, row: Row) -> None:
    engine = FakeEngine()
    engine.pause_after = 1
    statuses: list[int] = []
    with serving(engine, ServeOptions(port=0, keys=KeyRing.open(keys_file))) as running:
        crowd = [
            threading.Thread(target=lambda: statuses.append(ask(running, ANN).status_code)) for _ in range(12)
        ]
        for thread in crowd:
            thread.start()
        while len(statuses) < 10:
            time.sleep(0.01)
        engine.go.set()
        for thread in crowd:
            thread.join(90.0)
        assert sorted(statuses) == [200] * 2 + [429] * 10
        while (left := ask(running, ANN, max_tokens=400)).status_code == 200:
            pass
        assert (left.status_code, left.json()["error"]["code"]) == (402, "insufficient_quota")
        assert ask(running, BOB).status_code == 200
        spent = scrape(f"{running.url}/metrics", ANN)
        used = sum(
            spent("convoy_key_tokens_total", key="ann", kind=kind) for kind in ("prompt", "completion")
        )
    row.tries += len(statuses) - 1
    row.tried("RateLimited", "NoBalance")
    assert used <= 2000


@pytest.mark.attack("one tenant reads another's counts", layer=LAYER)
def test_no_path_tells_a_tenant_of_another(server: Running, row: Row) -> None:
    ask(server, BOB)
    for path in ("/metrics", "/status", "/v1/models", "/health", "/v1/models/fake", "/keys"):
        text = httpx.get(f"{server.url}{path}", headers={"x-api-key": ANN}).text
        row.tried("nothing of it")
        assert "bob" not in text, path
        assert BOB not in text, path


@pytest.mark.attack("a request that cannot fit, again and again", layer=LAYER)
def test_a_client_that_repeats_a_hopeless_request_costs_no_work(server: Running, row: Row) -> None:
    statuses = [
        ask(server, BOB, prompt="a" * (MAX_CONTEXT + 1), max_tokens=None).status_code for _ in range(30)
    ]
    row.tries += len(statuses) - 1
    row.tried("RequestError", "RateLimited")
    assert statuses == [400] * 5 + [429] * 25
    assert not server.engine.handles


@pytest.mark.attack("a foreign Host or Origin", layer=LAYER)
@pytest.mark.parametrize("header", ["host", "origin"])
@pytest.mark.parametrize(
    "value", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "null", "*"]
)
def test_a_page_of_another_site_gets_nothing(server: Running, row: Row, header: str, value: str) -> None:
    value = value if header == "host" or value == "null" else f"https://{value}"
    answer = httpx.get(f"{server.url}/v1/models", headers={header: value, "x-api-key": ANN})
    row.tried(f"{answer.status_code}")
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.attack("two keys in one request", layer=LAYER)
def test_two_keys_are_no_way_to_smuggle_one(server: Running, row: Row) -> None:
    for pair in ((ANN, BOB), (BOB, ANN), (ANN, "wrong"), ("wrong", ANN)):
        headers = {"authorization": f"Bearer {pair[0]}", "x-api-key": pair[1]}
        answer = httpx.get(f"{server.url}/v1/models", headers=headers)
        row.tried(f"{answer.status_code}")
        assert answer.status_code == 401


@pytest.mark.attack("a keys file of garbage", layer=LAYER)
@EXAMPLES
@given(data=st.binary(max_size=2000))
def test_garbage_is_no_keys_file(row: Row, data: bytes) -> None:
    said = "one bare key"
    try:
        assert len(parse_keys(data, Path("keys.toml"))) == 1
    except ConfigError as error:
        said = error.message
    row.tried("one bare key" if said == "one bare key" else "ConfigError")
    assert said == "one bare key" or "keys.toml" in said


@pytest.mark.attack("a keys file that others can write or read", layer=LAYER)
@pytest.mark.parametrize("mode", [0o602, 0o604, 0o606, 0o666, 0o644])
def test_an_open_keys_file_is_refused_at_the_start_and_later(keys_file: Path, row: Row, mode: int) -> None:
    ring = KeyRing.open(keys_file)
    keys_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}") as caught:
        read_key_file(keys_file)
    row.tried(type(caught.value).__name__)
    ring.reload()
    assert ring.find(ANN).name == "ann"


@pytest.mark.attack("half a request with a wrong key", layer=LAYER)
def test_a_wrong_key_is_refused_before_its_body_is_read(server: Running, row: Row) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=90.0) as sock:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: wrong-key-of-a-stranger\r\n"
        sock.sendall(f"{head}content-length: 1000000\r\n\r\n{{".encode())
        said = sock.recv(200)
    row.tried(said.split()[1].decode())
    assert said.startswith(b"HTTP/1.1 401")
