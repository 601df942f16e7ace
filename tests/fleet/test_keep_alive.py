"""Streams that say nothing for long are kept alive by events, at a coordinator and at a blind proxy."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from convoy.crypto.identity import Identity
from convoy.errors import StageLost
from convoy.fleet.apis.table import APIS
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from convoy.fleet.proxy.trust import Trust
from convoy.wire.fleet.messages import Kind
from support.anthropic_events import blocks_of, parse_stream
from support.cases import cases
from support.chat_events import parse_chat_stream
from support.fake_service import REPLY, FakeEngine, serving
from support.fleet import MODEL, FleetUnderTest
from support.proxy import proxy
from support.response_events import parse_response_stream

HEARTBEAT_S = 0.05
Events = list[dict[str, Any]]


@dataclass(frozen=True)
class Spoken:
    """Describe one API: its strict parser, its sign of life, and the text and error of its events."""

    parse: Callable[[str], Events]
    sign: str
    text: Callable[[Events], str]
    error: Callable[[Events], Any]


def _text_of_chat(events: Events) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def _text_of_response(events: Events) -> str:
    text: str = events[-1]["response"]["output"][0]["content"][0]["text"]
    return text


SPOKEN: dict[Kind, Spoken] = {
    "chat": Spoken(
        parse_chat_stream,
        '"delta":{},"logprobs":null,"finish_reason":null',
        _text_of_chat,
        lambda events: events[-1].get("error"),
    ),
    "messages": Spoken(
        parse_stream,
        "event: ping",
        lambda events: blocks_of(events)[0]["text"],
        lambda events: events[-1].get("error"),
    ),
    "responses": Spoken(
        parse_response_stream,
        "event: response.in_progress",
        _text_of_response,
        lambda events: events[-1]["response"]["error"],
    ),
}
# The first letter of the answer, as each API writes a piece of text.
FIRST = f'"(?:content|text|delta)":"{REPLY[0]}'
# Each API and each way. `make test-long` has the other pairs.
QUICK = [("chat", "coordinator"), ("messages", "proxy"), ("responses", "coordinator")]
EACH_API = pytest.mark.parametrize(
    ("api", "way"), cases(itertools.product(SPOKEN, ("coordinator", "proxy")), QUICK.__contains__)
)


class Fleet:
    """Run a coordinator with short heartbeats, a head that waits for its test, and a proxy."""

    def __init__(self, folder: Path, stack: ExitStack, max_wait_s: float) -> None:
        self.engine = FakeEngine()
        head = stack.enter_context(serving(self.engine, model=MODEL))
        options = CoordinatorOptions(
            instance="test", models={MODEL: ModelOptions()}, queue=QueueLimits(50, 40, max_wait_s)
        )
        self.fleet = FleetUnderTest(folder, options, heartbeat_s=HEARTBEAT_S)
        stack.callback(self.fleet.close)
        self._identities, self._url = [Identity.generate(), Identity.generate()], head.url
        trust = Trust(frozenset(one.public_key for one in self._identities))
        way = proxy(self.fleet.url, self.fleet.key, trust, heartbeat_s=HEARTBEAT_S)
        self.urls = {"coordinator": self.fleet.url, "proxy": stack.enter_context(way)}

    def add(self, url: str = "") -> None:
        identity = self._identities.pop()
        self.fleet.add(f"provider-{len(self._identities)}", url or self._url, identity=identity)

    @contextmanager
    def ask(self, api: Kind, way: str, prompt: str = "What is it?") -> Iterator[httpx.Response]:
        row = APIS[api]
        body = {"model": MODEL, "stream": True, row.prompt: [{"role": "user", "content": prompt}]}
        if row.needs_limit:
            body[row.limits[0]] = 50
        headers = {"authorization": f"Bearer {self.fleet.key}"}
        url = self.urls[way] + row.path
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30, trust_env=False) as answer:
            yield answer


@pytest.fixture
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack, getattr(request, "param", 30.0))


def read(answer: httpx.Response, sign: str, once_alive: Callable[[], Any], *, behind: str = "") -> str:
    """Return a whole stream.

    ``once_alive`` is called after three signs of life behind the first match of ``behind``.
    """
    assert answer.status_code == 200, answer.read()
    text, called = "", False
    for part in answer.iter_text():
        text += part
        begun = re.search(behind, text)
        if not called and begun is not None and text.count(sign, begun.end()) >= 3:
            called = True
            once_alive()
    assert called
    return text


@EACH_API
def test_a_long_prefill_is_kept_alive_by_events(made: Fleet, api: Kind, way: str) -> None:
    made.add()
    made.engine.pause_after = 0
    spoken = SPOKEN[api]
    with made.ask(api, way) as answer:
        text = read(answer, spoken.sign, made.engine.go.set)
    assert spoken.text(spoken.parse(text)) == REPLY
    assert "still here" not in text


@EACH_API
def test_a_silence_in_mid_answer_is_kept_alive_by_events(made: Fleet, api: Kind, way: str) -> None:
    made.add()
    made.engine.pause_after = 3
    spoken = SPOKEN[api]
    with made.ask(api, way) as answer:
        text = read(answer, spoken.sign, made.engine.go.set, behind=FIRST)
    assert spoken.text(spoken.parse(text)) == REPLY


@EACH_API
def test_a_request_that_waits_for_a_provider_is_kept_alive_by_events(
    made: Fleet, api: Kind, way: str
) -> None:
    spoken = SPOKEN[api]
    with made.ask(api, way) as answer:
        text = read(answer, spoken.sign, made.add)
    assert spoken.text(spoken.parse(text)) == REPLY
    # The provider was not known when the headers went out.
    assert '"x-convoy-provider' in text.rpartition(": headers ")[2]


@EACH_API
def test_a_provider_that_fails_after_the_first_event_is_replaced_unseen(
    made: Fleet, api: Kind, way: str
) -> None:
    made.add()
    engine, spoken = made.engine, SPOKEN[api]
    engine.pause_after = engine.fail_after = 0
    engine.error = StageLost("beta is gone")
    with serving(FakeEngine("The other one answers."), model=MODEL) as other, made.ask(api, way) as answer:

        def replace() -> None:
            made.add(other.url)
            engine.go.set()

        text = read(answer, spoken.sign, replace)
    assert spoken.text(spoken.parse(text)) == "The other one answers."


@EACH_API
def test_a_refusal_after_the_first_event_is_the_last_event(made: Fleet, api: Kind, way: str) -> None:
    spoken = SPOKEN[api]
    with made.ask(api, way, "x" * 5000) as answer:
        text = read(answer, spoken.sign, made.add)
    error = spoken.error(spoken.parse(text))
    assert "4096" in error["message"]
    assert error.get("code") in {None, "context_length_exceeded"}


@EACH_API
@pytest.mark.parametrize("made", [0.5], indirect=True)
def test_a_wait_that_ends_without_a_provider_ends_the_stream_with_an_error(
    made: Fleet, api: Kind, way: str
) -> None:
    spoken = SPOKEN[api]
    with made.ask(api, way) as answer:
        text = read(answer, spoken.sign, lambda: None)
    assert "no provider" in spoken.error(spoken.parse(text))["message"]


@EACH_API
def test_an_answer_that_breaks_ends_with_the_error_of_its_api(made: Fleet, api: Kind, way: str) -> None:
    made.add()
    engine = made.engine
    engine.pause_after = engine.fail_after = 3
    engine.error = StageLost("beta is gone")
    spoken = SPOKEN[api]
    with made.ask(api, way) as answer:
        text = read(answer, spoken.sign, engine.go.set, behind=FIRST)
    assert "provider failed" in spoken.error(spoken.parse(text))["message"]
    assert "beta" not in text
    assert "[DONE]" not in text
