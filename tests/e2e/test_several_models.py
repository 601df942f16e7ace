"""One head with two models over two members: a change under load, a loss during it, and an idle model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from e2e.served import Served, served
from support.scraping import scrape
from support.waiting import wait_until

pytestmark = pytest.mark.slow

SMALL, OTHER = "demo-mini", "other"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("several")
    with served(folder, SMALL, "--members", "2", "--also", f"{OTHER}=demo") as running:
        yield running


def ask(head: Served, model: str, num_tokens: int = 8, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "The sum of 3 and 4 is", "max_tokens": num_tokens, "ignore_eos": True}
    return httpx.post(f"{head.url}/v1/completions", json={**body, "temperature": 0, **more}, timeout=120)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def status(head: Served) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{head.url}/status", timeout=60).json()
    return found


def states(head: Served) -> dict[str, str]:
    return {model["name"]: model["state"] for model in status(head)["models"]}


def test_both_models_are_listed_and_an_unknown_name_is_told_which_there_are(head: Served) -> None:
    listed = httpx.get(f"{head.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [SMALL, OTHER]
    refused = ask(head, "third")
    assert refused.status_code == 404
    assert f"{SMALL}, {OTHER}" in refused.json()["error"]["message"]


def test_models_change_under_load_and_every_answer_is_its_own_models(head: Served) -> None:
    alone = {model: text(ask(head, model, 24)) for model in (SMALL, OTHER)}
    assert alone[SMALL] != alone[OTHER]
    wanted = [SMALL, OTHER] * 6
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = list(pool.map(partial(ask, head, num_tokens=24), wanted))
    assert [text(answer) for answer in answers] == [alone[model] for model in wanted]
    now = status(head)
    assert sorted(states(head).values()) == ["loaded", "unloaded"]
    assert (now["recoveries"], now["running"]) == (0, 0)
    loaded = next(model for model, state in states(head).items() if state == "loaded")
    samples = scrape(f"{head.url}/metrics").samples
    named = {dict(labels)["model_name"] for name, labels in samples if name.startswith("vllm:")}
    assert named == {loaded}


@pytest.mark.long
def test_every_api_loads_the_model_that_it_names(head: Served) -> None:
    turns = [{"role": "user", "content": "3+4"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/messages", {"messages": turns, "max_tokens": 4}),
        ("/v1/responses", {"input": "3+4"}),
        ("/api/chat", {"messages": turns, "stream": False}),
    ]
    for number, (path, body) in enumerate(asked):
        model = (OTHER, SMALL)[number % 2]
        answer = httpx.post(f"{head.url}{path}", json={"model": model, **body}, timeout=120)
        assert answer.status_code == 200, (path, answer.text)
        assert states(head)[model] == "loaded", path


def test_a_request_without_a_wish_to_keep_its_model_unloads_it(head: Served) -> None:
    before = text(ask(head, SMALL))
    assert text(ask(head, SMALL, keep_alive=0)) == before
    wait_until(lambda: set(states(head).values()) == {"unloaded"})
    assert status(head)["stages"] == []
    assert httpx.get(f"{head.url}/health").status_code == 200
    assert text(ask(head, SMALL, keep_alive=-1)) == before
    assert len(status(head)["stages"]) == 2


# The last one, because it ends a member.
def test_a_member_that_is_killed_during_a_change_costs_no_answer(head: Served) -> None:
    alone = {model: text(ask(head, model, 24)) for model in (SMALL, OTHER)}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, head, SMALL, 24) for _ in range(2)]
        wait_until(lambda: states(head)[SMALL] != "unloaded")
        (peer,) = head.peers()
        peer.kill()
        assert [text(one.result()) for one in asked] == [alone[SMALL]] * 2
    assert text(ask(head, OTHER, 24)) == alone[OTHER]
    assert len(status(head)["stages"]) == 1
