"""A fleet of real processes: what its clients see while providers, members and the coordinator are killed.

The scenarios of `bench/compare.py providers` ask it under load; here something is lost meanwhile.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from cli.transcript import run_convoy
from comparisons.fleet.load import FleetLoad, LoadResult
from comparisons.fleet.scenario import PRICE, Scenario, account_name
from comparisons.local_fleet import FleetOptions, LocalFleet
from support.fleet import streamed

pytestmark = [pytest.mark.slow, pytest.mark.long]

MODEL = "demo-mini"
CREDIT = 10**9
PRICES = {"prompt_micro": PRICE.prompt_micro, "completion_micro": PRICE.completion_micro}
LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me a story about a fox"}],
    "max_tokens": 1200,
    "ignore_eos": True,
    "temperature": 0.9,
    "seed": 5,
    "stream": True,
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[LocalFleet]:
    with LocalFleet(FleetOptions({MODEL: 2}, prices=PRICES)) as made:
        yield made


def until(holds: Callable[[], bool], wait_s: float = 60.0) -> None:
    """Poll until it holds: a process has no event to wait on."""
    end_s = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come about in time"
        time.sleep(0.05)


def client_of(url: str, key: str | None = None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)


def told(client: httpx.Client, body: dict[str, Any], on_text: Callable[[], None] | None = None) -> str:
    """Return the text of a streamed answer, see `streamed`; call ``on_text`` once some of it is here."""
    lines = []
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            lines.append(line)
            if on_text is not None and sum('"content":"' in one for one in lines) > 8:
                on_text()
                on_text = None
    assert on_text is None, "it was over before anything could be lost"
    return streamed("\n".join(lines))


def test_the_openai_client_asks_a_fleet_as_it_asks_a_head(fleet: LocalFleet) -> None:
    key = fleet.open_account("openai", CREDIT)
    with OpenAI(base_url=f"{fleet.url}/v1", api_key=key, max_retries=0, timeout=60.0) as client:
        (model,) = client.models.list()
        assert model.id == MODEL
        question: Any = [{"role": "user", "content": "What is 4+5? Answer with just the number."}]
        whole = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=8)
        stream = client.chat.completions.create(
            model=MODEL, messages=question, temperature=0, max_tokens=8, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    books = fleet.books()
    assert books.charged["openai"] == 2
    cost = PRICE.cost(whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert books.balance_micro["openai"] == CREDIT - 2 * cost


def test_a_coordinator_that_is_killed_loses_nothing_that_was_settled(fleet: LocalFleet) -> None:
    key = fleet.open_account("ann", CREDIT)
    question = {**LONG, "max_tokens": 8, "stream": False}
    with client_of(fleet.url, key) as client:
        usage = [client.post("/v1/chat/completions", json=question).json()["usage"] for _ in range(3)]
        cost = sum(PRICE.cost(one["prompt_tokens"], one["completion_tokens"]) for one in usage)
        assert fleet.books().cost_micro["ann"] == cost > 0
        with pytest.raises(httpx.HTTPError):
            told(client, LONG, on_text=fleet.kill_coordinator)
    held = fleet.books()
    assert held.balance_micro["ann"] < CREDIT - cost, "what the broken request may cost is held"
    assert fleet.start_coordinator()["released"] == 1
    books = fleet.books()
    assert (books.charged["ann"], books.cost_micro["ann"]) == (3, cost)
    assert books.balance_micro["ann"] == CREDIT - cost
    assert not books.torn
    fleet.wait_registered(2)  # no one told them
    with client_of(fleet.url, key) as client:
        assert client.post("/v1/chat/completions", json=question).status_code == 200


def test_commands_for_administrators_find_the_coordinator_of_their_folder(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    done = run_convoy(["coordinator", "status", "--dir", str(fleet.directory), "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert {one["name"] for one in json.loads(done.stdout)["providers"]} == set(fleet.names)


def test_convoy_chat_asks_a_fleet_without_being_told_the_model(fleet: LocalFleet, tmp_path: Path) -> None:
    (tmp_path / "ann.key").write_text(fleet.open_account("chat", CREDIT) + "\n")
    (tmp_path / "ann.key").chmod(0o600)
    flags = ["--url", fleet.url, "--api-key-file", "ann.key", "--max-tokens", "8", "--temperature", "0"]
    done = run_convoy(["chat", "What is 4+5? Answer with just the number.", *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_litellm_asks_a_fleet(fleet: LocalFleet) -> None:
    litellm = pytest.importorskip("litellm")
    key = fleet.open_account("litellm", CREDIT)
    question = [{"role": "user", "content": "What is 4+5? Answer with just the number."}]
    asked = {"model": f"openai/{MODEL}", "api_base": f"{fleet.url}/v1", "api_key": key, "max_tokens": 8}
    whole = litellm.completion(messages=question, temperature=0, **asked)
    stream = litellm.completion(messages=question, temperature=0, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == text != ""


def test_a_provider_that_is_killed_under_load_loses_no_request_that_had_not_begun(fleet: LocalFleet) -> None:
    # last of this module: one provider is left
    scenario = Scenario("killed", {MODEL: 2}, 3, 120, 12, True, 24, 200, CREDIT)
    keys = {name: fleet.open_account(name, CREDIT) for name in map(account_name, range(3))}
    answers: list[LoadResult] = []

    def ask() -> None:
        answers.extend(FleetLoad(scenario, fleet.url, keys).run()[0])

    thread = threading.Thread(target=ask)
    thread.start()
    victim = fleet.names[0]

    def is_busy() -> bool:
        return any(one["name"] == victim and one["models"][MODEL] for one in fleet.status()["providers"])

    until(is_busy)
    fleet.kill_provider(victim)
    thread.join(120)
    assert len(answers) == 120
    assert {answer.provider for answer in answers if answer.is_served} >= {fleet.names[1]}
    lost = [answer for answer in answers if not answer.is_served]
    # a client with a token has a 200 too, and then an error in place of an end
    assert [answer.status for answer in lost if answer.status != 200 or not answer.error] == []
    assert len(lost) <= 4, "no more than ran there"
    books = fleet.books()
    assert sum(books.charged.get(name, 0) for name in keys) == 120 - len(lost)
    assert not books.torn


def test_a_member_that_is_killed_inside_a_provider_is_not_seen_by_who_asked() -> None:
    options = FleetOptions({MODEL: 1}, members=2, prices=PRICES)
    with LocalFleet(options) as fleet:
        (name,) = fleet.names
        (listed,) = fleet.status()["providers"]
        levels = set(listed["members"].values())
        assert (listed["level"], len(listed["members"]), levels) == ("self_signed", 2, {"self_signed"})
        key = fleet.open_account("ann", CREDIT)
        with client_of(fleet.head_url(MODEL)) as head:
            assert len(head.get("/status").json()["stages"]) == 2
            alone = told(head, LONG)
        assert alone.endswith("."), "it ended, and not by an error"
        with client_of(fleet.url, key) as client:
            assert told(client, LONG, on_text=lambda: fleet.kill_peer(name)) == alone
        with client_of(fleet.head_url(MODEL)) as head:
            assert len(head.get("/status").json()["stages"]) == 1, "the head goes on alone"
        assert fleet.books().charged == {"ann": 1}
