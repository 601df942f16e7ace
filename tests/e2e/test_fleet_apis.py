"""The three APIs through real processes: a coordinator, a provider of two members, and a blind proxy.

The model has random weights, so a grammar makes it call: the answers are long, valid and the same each time.
Reasoning is off, because random weights may open one and never end it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from cli.transcript import run_convoy
from comparisons.local_fleet import FleetOptions, LocalFleet
from support.anthropic_events import blocks_of, parse_message, parse_stream
from support.chat_events import parse_chat_stream
from support.programs import Program
from support.response_events import parse_response, parse_response_stream

pytestmark = [pytest.mark.slow, pytest.mark.long]

MODEL = "synthetic:agent@7"
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET", "EST"]}, "hours": {"type": "boolean"}},
    "required": ["zone", "hours"],
    "additionalProperties": False,
}
TURN: dict[str, Any] = {"role": "user", "content": "When is it?"}
LIMIT = 200
FUNCTION: dict[str, Any] = {"name": "clock", "parameters": SCHEMA}
WAYS = ("coordinator", "proxy")


@dataclass(frozen=True)
class Judged:
    """Describe one API: its request for a call, and the arguments in a stream and in a whole answer."""

    path: str
    body: dict[str, Any]
    streamed: Callable[[str], Any]
    whole: Callable[[str], Any]


def _streamed_chat(text: str) -> Any:
    deltas = [choice["delta"] for chunk in parse_chat_stream(text) for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    return json.loads("".join(call["function"].get("arguments") or "" for call in calls))


def _whole_chat(text: str) -> Any:
    return json.loads(json.loads(text)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])


def _whole_message(text: str) -> Any:
    return next(block for block in parse_message(text).content if block.type == "tool_use").input


def _streamed_message(text: str) -> Any:
    return json.loads(next(block["json"] for block in blocks_of(parse_stream(text)) if block["json"]))


def _call_of(response: dict[str, Any]) -> Any:
    return json.loads(next(one["arguments"] for one in response["output"] if one["type"] == "function_call"))


JUDGED = {
    "chat": Judged(
        "/v1/chat/completions",
        {
            "messages": [TURN],
            "max_tokens": LIMIT,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "chat_template_kwargs": {"enable_thinking": False},
        },
        _streamed_chat,
        _whole_chat,
    ),
    "messages": Judged(
        "/v1/messages",
        {
            "messages": [TURN],
            "max_tokens": LIMIT,
            "tools": [{"name": "clock", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "disabled"},
        },
        _streamed_message,
        _whole_message,
    ),
    "responses": Judged(
        "/v1/responses",
        {
            "input": TURN["content"],
            "max_output_tokens": LIMIT,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "store": True,
            "reasoning": {"effort": "none"},
        },
        lambda text: _call_of(parse_response_stream(text)[-1]["response"]),
        lambda text: _call_of(parse_response(text).to_dict()),
    ),
}


class Fleet:
    """Run a fleet of real processes, with a proxy that trusts its provider."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.fleet = stack.enter_context(LocalFleet(FleetOptions({MODEL: 1}, members=2)))
        self.key = self.fleet.open_account("ann", 10**12)
        (folder / "ann.key").touch(mode=0o600)
        (folder / "ann.key").write_text(self.key + "\n")
        (listed,) = self.fleet.status()["providers"]
        flags = ("--api-key-file", "ann.key", "--port", "0", "--json", "--trust-provider", listed["identity"])
        program = Program(folder, "proxy", "proxy", self.fleet.url, *flags)
        stack.callback(program.stop)
        self.urls = {"coordinator": self.fleet.url, "proxy": program.ready()["url"]}
        with OpenAI(base_url=f"{self.fleet.url}/v1", api_key=self.key) as client:
            (model,) = client.models.list()
        self.model = model.id

    def post(self, way: str, path: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        asked = {"model": self.model, "temperature": 0, **body}
        answer = httpx.post(
            f"{self.urls[way]}{path}", json=asked, headers=headers, timeout=120, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("apis"), stack)


@pytest.mark.parametrize("api", JUDGED)
def test_a_call_is_the_same_streamed_and_whole_and_on_both_ways(fleet: Fleet, api: str) -> None:
    judged = JUDGED[api]
    found = []
    for way in WAYS:
        answer = fleet.post(way, judged.path, **judged.body)
        sealed = "end-to-end" if way == "proxy" else "by-coordinator"
        assert answer.headers["x-convoy-sealed"] == sealed
        found += [judged.whole(answer.text)]
        found += [judged.streamed(fleet.post(way, judged.path, **judged.body, stream=True).text)]
    assert set(found[0]) == {"zone", "hours"}
    assert found == [found[0]] * 4


def test_convoy_chat_asks_both_ways_without_being_told_the_model(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "ann.key").touch(mode=0o600)
    (tmp_path / "ann.key").write_text(fleet.key + "\n")
    for way in WAYS:
        flags = ["--url", fleet.urls[way], "--api-key-file", "ann.key", "--max-tokens", "5"]
        done = run_convoy(["chat", "When is it?", *flags], tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_no_response_of_a_fleet_is_stored(fleet: Fleet) -> None:
    for way in WAYS:
        response = fleet.post(way, "/v1/responses", **JUDGED["responses"].body).json()
        assert response["store"] is False
        with OpenAI(base_url=f"{fleet.urls[way]}/v1", api_key=fleet.key, max_retries=0) as client:
            for ask in (client.responses.retrieve, client.responses.delete):
                with pytest.raises(Exception, match="stores no responses"):
                    ask(response["id"])


def test_both_ways_count_tokens_and_charge_by_the_same_usage(fleet: Fleet) -> None:
    from anthropic import Anthropic

    tools: Any = [{"name": "clock", "input_schema": SCHEMA}]
    for way in WAYS:
        charged = fleet.fleet.books().charged.get("ann", 0)
        with Anthropic(base_url=fleet.urls[way], api_key=fleet.key, max_retries=0) as client:
            turns: Any = [TURN]
            counted = client.messages.count_tokens(model=fleet.model, messages=turns, tools=tools)
            message = client.messages.create(model=fleet.model, messages=turns, tools=tools, max_tokens=5)
        usage = message.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
        # The next turn of an agent begins as its first one did, and an account keeps its salt.
        again = fleet.post(way, "/v1/messages", messages=[TURN], tools=tools, max_tokens=5).json()["usage"]
        assert again["cache_read_input_tokens"] > 0
        assert fleet.fleet.books().charged["ann"] == charged + 3
