"""The forward layout as a client meets it: the last peer samples every token, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from convoy.cli import main
from e2e.served import Served, served

STORY = "Once upon a time there was a fox"
ASKED: dict[str, Any] = {"model": "demo", "prompt": STORY, "max_tokens": 12, "seed": 5, "temperature": 0.8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("whole"), "demo", "--members", "1") as running:
        yield running


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--members", "2", "--layers", "0:5", "--prefill-chunk", "16", "--prefill-window", "4")
    with served(tmp_path_factory.mktemp("forward"), "demo", *flags) as running:
        yield running


def client_of(head: Served) -> OpenAI:
    return OpenAI(base_url=f"{head.url}/v1", api_key="unused", max_retries=0, timeout=60.0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0, "logprobs": 5},
        {"n": 3, "frequency_penalty": 1.0, "presence_penalty": -0.5},
        {"echo": True, "logprobs": 2, "max_tokens": 4},
        {"logit_bias": {"300": 100.0}, "temperature": 0.0},
        {"stop": ["e"], "seed": 9},
    ],
)
def test_the_openai_client_gets_what_one_member_would_answer(
    whole: Served, forward: Served, changes: dict[str, Any]
) -> None:
    with client_of(whole) as one, client_of(forward) as other:
        expected = one.completions.create(**(ASKED | changes))
        found = other.completions.create(**(ASKED | changes))
        assert found.choices == expected.choices
        streamed = list(other.completions.create(**(ASKED | changes), stream=True))
        for choice in expected.choices:
            texts = [c.text for part in streamed for c in part.choices if c.index == choice.index]
            assert "".join(texts) == choice.text


@pytest.mark.slow
@pytest.mark.long
def test_the_openai_client_gets_what_one_member_says(
    forward: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--max-tokens", "12", "--temperature", "0.8", "--seed", "5")
    assert main.run(["run", "demo", "--raw", "--prompt", STORY, *asked, "--members", "1", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    with client_of(forward) as client:
        assert client.completions.create(**ASKED).choices[0].text == expected["text"]
        streamed = client.completions.create(**ASKED, stream=True)
        assert "".join(c.text for part in streamed for c in part.choices) == expected["text"]


@pytest.mark.slow
@pytest.mark.long
def test_status_and_health_tell_of_the_forward_route(forward: Served) -> None:
    status = httpx.get(f"{forward.url}/status").json()
    assert status["route"] == "complete: alpha 0:5 -> beta 6:output"
    assert [(s["embed"], s["output"], s["can_read_prompts"]) for s in status["stages"]] == [
        (True, False, "tokens"),
        (False, True, "tokens"),
    ]
    assert httpx.get(f"{forward.url}/health").status_code == 200


def test_plan_names_the_peer_that_reads_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "demo", "--members", "3", "--layers", "0:3", "--speed", "10,100", "--json"]
    assert main.run(asked) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["token_id_members"] == ["alpha", "gamma"]
    assert plan["peers_seeing_token_ids"] == ["gamma"]
    assert plan["hops"][-1]["receiver"] == "gamma"
