"""Clients that leave, servers that end, and a health that means it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from convoy.api.listen.options import ServeOptions
from convoy.api.model_switch import ModelSwitch
from convoy.api.server import Stop, bind, run_server, serve_on
from convoy.api.service import ServedModel, Service
from convoy.errors import ConfigError
from support.fake_loader import FakeLoader
from support.fake_service import REPLY, ByteTokenizer, FakeEngine, Running, events, serving, serving_of
from support.waiting import wait_until

TEXT = "/v1/completions"


def connect(running: Running, body: bytes) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


@pytest.mark.parametrize("body", [b'{"prompt": "a"}', b'{"prompt": "a", "stream": true}'])
def test_a_client_that_leaves_aborts_its_request(body: bytes) -> None:
    with serving() as running:
        running.engine.pause_after = 3
        client = connect(running, body)
        assert running.engine.paused.wait(10)
        assert not running.engine.handles[0].aborted.is_set()
        client.close()
        assert running.engine.handles[0].aborted.wait(60)


def test_a_client_that_closes_a_stream_aborts_it_and_others_go_on() -> None:
    with serving() as running, OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
        running.engine.pause_after = 3
        stream = client.completions.create(model="fake", prompt="a", stream=True)
        next(iter(stream))
        stream.close()
        assert running.engine.handles[0].aborted.wait(60)
        running.engine.go.set()
        assert client.completions.create(model="fake", prompt="a").choices[0].text == REPLY
        assert not running.engine.handles[1].aborted.is_set()


def test_every_prompt_of_a_client_that_leaves_is_aborted() -> None:
    with serving() as running:
        running.engine.pause_after = 1
        client = connect(running, b'{"prompt": ["a", "b", "c"], "n": 2}')
        deadline = time.monotonic() + 10
        while len(running.engine.handles) < 3 and time.monotonic() < deadline:
            running.thread.join(0.01)
        client.close()
        assert len(running.engine.handles) == 3
        assert all(handle.aborted.wait(10) for handle in running.engine.handles)


def test_a_complete_answer_aborts_nothing(server: Running, http: httpx.Client) -> None:
    assert http.post(TEXT, json={"prompt": "a"}).status_code == 200
    assert http.post(TEXT, json={"prompt": "a", "stream": True}).text.endswith("[DONE]\n\n")
    assert not any(handle.aborted.is_set() for handle in server.engine.handles[-2:])


def test_a_client_that_stops_reading_is_given_up() -> None:
    options = ServeOptions(port=0, write_timeout_s=0.3)
    with serving(FakeEngine("a" * 60_000), options, max_context=100_000) as running:
        running.engine.pause_after = 59_999
        client = connect(running, b'{"prompt": "a", "stream": true}')
        assert running.engine.admitted.wait(60)
        assert running.engine.handles[0].aborted.wait(60)
        client.close()


def test_sixteen_at_once_each_get_their_own() -> None:
    with serving(FakeEngine(lambda request: bytes(request.prompt_ids).decode() * 5)) as running:
        with OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:

            def ask(number: int) -> str:
                prompt = f"<{number}>" * (number + 1)
                if number % 2:
                    return client.completions.create(model="fake", prompt=prompt).choices[0].text
                stream = client.completions.create(model="fake", prompt=prompt, stream=True)
                return "".join(chunk.choices[0].text for chunk in stream)

            with ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(ask, range(16)))
        assert answers == [f"<{number}>" * (number + 1) * 5 for number in range(16)]


def test_a_silent_stream_says_that_it_lives() -> None:
    with serving(options=ServeOptions(port=0, heartbeat_s=0.05)) as running:
        running.engine.pause_after = 0
        with httpx.stream("POST", running.url + TEXT, json={"prompt": "a", "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith(":")
            running.engine.go.set()
            assert "data: [DONE]" in list(lines)


def test_health_means_it() -> None:
    with serving() as running, httpx.Client(base_url=running.url) as http:
        assert http.get("/health").json() == {"status": "ready", "reason": ""}
        running.health[0] = (False, "the last step passed every stage 31 s ago")
        answer = http.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {"status": "not ready", "reason": "the last step passed every stage 31 s ago"}
        assert http.get("/status").json() == {"model": "fake", "ready": False, "stages": []}


def test_models_are_listed(http: httpx.Client) -> None:
    card = http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 4096)
    assert http.get("/v1/models/fake").json() == card
    assert http.get("/v1/models/other").status_code == 404


def test_a_drain_lets_answers_end_and_takes_no_new_ones() -> None:
    with (
        serving(options=ServeOptions(port=0, drain_s=20.0)) as running,
        httpx.Client(base_url=running.url) as http,
    ):
        running.engine.pause_after = 3
        with http.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as answer:
            assert running.engine.paused.wait(10)
            running.stop.request()
            while http.get("/health").status_code == 200:
                pass
            assert http.get("/health").json()["status"] == "draining"
            refused = http.post(TEXT, json={"prompt": "b"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            running.engine.go.set()
            seen = events(answer.read().decode())
        assert seen[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in seen[:-1]) == REPLY
        running.thread.join(10)
        assert not running.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health")


@pytest.mark.parametrize(("drain_s", "num_stops"), [(0.1, 1), (60.0, 2)])
def test_what_outlasts_the_drain_ends_with_an_error(drain_s: float, num_stops: int) -> None:
    with serving(options=ServeOptions(port=0, drain_s=drain_s)) as running:
        running.engine.pause_after = 3
        whole: list[httpx.Response] = []

        def ask() -> None:
            whole.append(httpx.post(running.url + TEXT, json={"prompt": "b"}, timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        with httpx.stream("POST", running.url + TEXT, json={"prompt": "a", "stream": True}) as answer:
            deadline = time.monotonic() + 10
            while len(running.engine.handles) < 2 and time.monotonic() < deadline:
                asking.join(0.01)
            for _ in range(num_stops):
                running.stop.request()
            seen = events(answer.read().decode())
        asking.join(10)
        assert seen[-1]["error"]["code"] == "draining"
        assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "draining")
        assert all(handle.aborted.wait(10) for handle in running.engine.handles)
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_a_request_that_waits_for_its_model_ends_with_the_error_of_a_drain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader, engine, stop = FakeLoader(), FakeEngine(), Stop()
    loader.gate.clear()
    models = tuple(ServedModel(name, engine, ByteTokenizer()) for name in ("a", "b"))
    service = Service(models, lambda: (True, ""), dict, switch=ModelSwitch(loader))
    with (
        serving_of(service, ServeOptions(port=0, drain_s=60.0), stop, engine.close) as (url, _),
        ThreadPoolExecutor(1) as pool,
    ):
        asking = pool.submit(httpx.post, url + TEXT, json={"model": "b", "prompt": "x"}, timeout=60)
        # It waits for b, which is being loaded.
        wait_until(lambda: loader.loaded is None)
        stop.request_now()
        try:
            answer = asking.result()
        finally:
            loader.gate.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert "Traceback" not in caplog.text
    assert engine.handles == []


def test_a_port_in_use_is_named_before_anything_starts() -> None:
    with bind(ServeOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken") as caught:
            bind(ServeOptions(port=port))
        assert caught.value.hint == f"use --port {port % 65535 + 1}, or stop the program that listens there"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:8123"):
        bind(ServeOptions(host=host, port=8123))


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="port 70000 is out of range, expected 0 to 65535"):
        ServeOptions(port=70000).check()


def test_what_on_ready_raises_ends_the_server() -> None:
    def on_ready(url: str) -> None:
        raise ValueError("nobody wants it")

    service = Service(models=(), health=lambda: (True, ""), status=dict)
    with pytest.raises(ValueError, match="nobody wants it"):
        run_server(service, ServeOptions(port=0), on_ready=on_ready)


def test_a_server_that_cannot_start_is_not_announced() -> None:
    announced: list[str] = []
    options = ServeOptions(port=0, tls=("absent.pem", "absent.key"))
    service = Service((), lambda: (True, ""), dict)
    with bind(options) as listener, pytest.raises(FileNotFoundError):
        serve_on(listener, service, options, Stop(), on_ready=announced.append)
    assert not announced


def test_a_stop_before_the_start_is_not_lost() -> None:
    stop = Stop()
    stop.request()
    service = Service(models=(), health=lambda: (True, ""), status=dict)
    assert run_server(service, ServeOptions(port=0), stop=stop) == 0


CHILD = """
import sys
from pathlib import Path
from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.api.server import run_server
from convoy.api.service import ServedModel, Service
from support.fake_service import ByteTokenizer, FakeEngine

engine = FakeEngine()
engine.pause_after = 3
service = Service((ServedModel("fake", engine, ByteTokenizer()),), lambda: (True, ""), dict)
options = ServeOptions(port=0, drain_s=60.0, keys=KeyRing.open(Path(sys.argv[1])) if sys.argv[1:] else None)
num_cut = run_server(service, options, on_ready=lambda url: print(url, flush=True))
engine.close()
print(f"ended, {num_cut} cut off", flush=True)
"""


@contextmanager
def serving_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that serves, and its address."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root / "tests")])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert child.stdout is not None
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_second_ends_at_once(number: signal.Signals) -> None:
    with serving_process() as (child, url):
        with httpx.stream("POST", url + TEXT, json={"prompt": "a", "stream": True}, timeout=60) as answer:
            child.send_signal(number)
            while httpx.get(f"{url}/health").status_code == 200:
                pass
            assert child.poll() is None
            child.send_signal(number)
            assert events(answer.read().decode())[-1]["error"]["code"] == "draining"
        assert child.wait(20) == 0
        assert child.stdout is not None
        assert child.stdout.read().strip() == "ended, 1 cut off"


def test_a_hangup_reads_the_keys_again_and_ends_nothing(tmp_path: Path) -> None:
    file, ann, bob = tmp_path / "keys.toml", "ann-has-a-long-key", "bob-has-a-long-key"
    file.touch(mode=0o600)
    file.write_text(f'[[keys]]\nname = "ann"\nkey = "{ann}"\n')

    def ask(url: str, key: str) -> int:
        return httpx.get(f"{url}/v1/models", headers={"x-api-key": key}, timeout=60.0).status_code

    with serving_process(str(file)) as (child, url):
        assert (ask(url, ann), ask(url, bob)) == (200, 401)
        file.write_text(f'[[keys]]\nname = "bob"\nkey = "{bob}"\n')
        child.send_signal(signal.SIGHUP)
        while ask(url, bob) != 200:
            pass
        assert ask(url, ann) == 401
        assert child.poll() is None
