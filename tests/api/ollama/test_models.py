"""Ollama's endpoints of several models: the loaded one, and requests that only load, or load nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from ollama import Client

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.api.model_switch import ModelSwitch, SwitchOptions
from convoy.api.service import ServedModel, Service
from support.fake_loader import FakeLoader
from support.fake_service import MAX_CONTEXT, ByteTokenizer, FakeEngine, serving_of
from support.waiting import wait_until

KEY = "sk-test-0123456789"


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


def switch_of(loader: FakeLoader) -> ModelSwitch:
    return ModelSwitch(loader, SwitchOptions(knows_several=True, keep_alive_s=600.0))


def served(switch: ModelSwitch, keys: KeyRing | None = None, engine: FakeEngine | None = None) -> Any:
    engine = engine or FakeEngine()
    models = tuple(ServedModel(name, engine, ByteTokenizer()) for name in ("a", "b"))
    stages = [{"weight_bytes": 30, "device": "cuda:0 (a card)"}, {"weight_bytes": 12, "device": "cpu+cpu"}]
    service = Service(models, lambda: (True, ""), lambda: {"stages": stages}, switch=switch)
    return serving_of(service, ServeOptions(port=0, keys=keys), on_stop=engine.close)


@pytest.fixture
def url(loader: FakeLoader) -> Iterator[str]:
    with served(switch_of(loader)) as (found, _):
        yield found


def test_a_request_without_a_prompt_only_loads_its_model(url: str, loader: FakeLoader) -> None:
    client = Client(url)
    loaded = client.generate("b")
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    assert loader.done == ["b"]
    chat = client.chat("a", messages=[])
    assert (chat.done_reason, chat.message.content) == ("load", "")
    (line,) = client.generate("a", stream=True)
    assert line.done_reason == "load"
    assert loader.done == ["b", "a"]


def test_the_same_with_keep_alive_0_unloads_it_and_loads_nothing(url: str, loader: FakeLoader) -> None:
    client = Client(url)
    assert client.generate("b", keep_alive=0).done_reason == "unload"
    assert (loader.done, loader.loaded) == ([], "a")
    assert client.generate("a", keep_alive=0).done_reason == "unload"
    assert loader.done == [None]
    assert client.ps().models == []


def test_an_unload_that_waits_behind_another_model_loads_nothing_again(loader: FakeLoader) -> None:
    engine, switch = FakeEngine(), switch_of(loader)
    engine.pause_after = 0
    with served(switch, engine=engine) as (url, _), ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(Client(url).generate, "a", "x")]
        assert engine.paused.wait(60)
        answers.append(pool.submit(Client(url).generate, "b", "x"))
        wait_until(lambda: switch.num_waiting == 1)
        answers.append(pool.submit(Client(url).generate, "a", keep_alive=0))
        wait_until(lambda: switch.num_waiting == 2)
        engine.go.set()
        reasons = [answer.result(60).done_reason for answer in answers]
        # It has ended after every change that waited.
        Client(url).generate("b")
    assert reasons == ["stop", "stop", "unload"]
    assert loader.done == ["b"]


def test_an_unload_waits_for_the_running_answers_and_is_done_when_it_answers(loader: FakeLoader) -> None:
    engine, switch = FakeEngine(), switch_of(loader)
    engine.pause_after = 0
    with served(switch, engine=engine) as (url, _), ThreadPoolExecutor(2) as pool:
        running = pool.submit(Client(url).generate, "a", "x")
        assert engine.paused.wait(60)
        wish = pool.submit(Client(url).generate, "a", keep_alive=0)
        wait_until(lambda: switch.num_waiting == 1)
        assert (loader.done, wish.done()) == ([], False)
        engine.go.set()
        assert running.result(60).done_reason == "stop"
        assert wish.result(60).done_reason == "unload"
        assert loader.done == [None]


def test_the_loaded_model_is_listed_with_its_end(url: str) -> None:
    client = Client(url)
    client.generate("b", "x", keep_alive="5m")
    (listed,) = client.ps().models
    assert (listed.model, listed.size, listed.size_vram) == ("b", 42, 30)
    assert listed.expires_at is not None
    assert 0 < (listed.expires_at - datetime.now(UTC)).total_seconds() <= 300
    client.generate("b", "x", keep_alive="never")
    assert client.ps().models[0].expires_at.year > 2300  # type: ignore[union-attr]


def test_the_time_of_a_load_is_not_that_of_the_prompt(url: str, loader: FakeLoader) -> None:
    loader.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Client(url).generate, "b", "x")
        wait_until(lambda: loader.loaded is None)
        loader.gate.set()
        answer = asked.result(60)
    times = (answer.load_duration or 0, answer.prompt_eval_duration or 0, answer.eval_duration or 0)
    assert times[0] > 0
    assert abs(sum(times) - (answer.total_duration or 0)) <= len(times), "each is rounded"


@pytest.mark.parametrize(
    ("path", "body", "key", "status"),
    [
        ("/v1/completions", {"prompt": "x" * (MAX_CONTEXT + 1)}, KEY, 400),
        ("/v1/completions", {"prompt": "x", "max_tokens": MAX_CONTEXT}, KEY, 400),
        ("/v1/completions", {"prompt": 5}, KEY, 400),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, KEY, 400),
        ("/v1/completions", {"prompt": "x", "keep_alive": "soon"}, KEY, 400),
        ("/v1/completions", {"prompt": "x"}, "sk-wrong", 401),
        ("/v1/chat/completions", {"messages": []}, KEY, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, KEY, 400),
        ("/v1/responses", {"input": 5}, KEY, 400),
        ("/v1/messages", {"messages": [], "max_tokens": 4}, KEY, 400),
        ("/v1/embeddings", {"input": []}, KEY, 400),
        ("/api/chat", {"messages": [], "keep_alive": "soon"}, KEY, 400),
        ("/api/chat", {"messages": []}, "sk-wrong", 401),
        ("/api/generate", {"keep_alive": 0}, KEY, 403),
        ("/page/models", {"name": "b", "loaded": True}, KEY, 403),
    ],
)
def test_a_request_that_is_refused_loads_no_model(
    path: str, body: dict[str, Any], key: str, status: int, loader: FakeLoader
) -> None:
    with served(switch_of(loader), KeyRing.of(KEY)) as (url, _):
        sent = body if path.startswith("/page/") else {"model": "b", **body}
        answer = httpx.post(f"{url}{path}", json=sent, headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert answer.status_code == status, answer.text
    assert loader.done == []
