"""Send the load of `bench/compare.py providers`: many requests at once, each once. Keep the answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from comparisons.fleet.scenario import Scenario, SimulatedRequest
from convoy.errors import PeerUnreachable

# The seconds that a client waits for an answer's next byte.
CLIENT_S = 300.0
_TIMING = ": timing "


@dataclass(slots=True)
class LoadResult:
    """Hold the answer to a request. ``timing_us`` is the coordinator's own; ``total_s`` is this client's."""

    asked: SimulatedRequest
    status: int = 0
    # The connection's error, or the code of an error that came as the answer.
    error: str = ""
    text: str = ""
    response_id: str = ""
    provider: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Finish reasons seen: exactly 1 in a good answer.
    ends: int = 0
    # True after a stream's [DONE], or a body that was read whole.
    is_complete: bool = False
    timing_us: dict[str, int] = field(default_factory=dict)
    total_s: float = 0.0

    @property
    def is_served(self) -> bool:
        return self.status == 200 and not self.error and self.is_complete and self.ends == 1


class FleetLoad:
    """Send all requests of a scenario, each once, ``concurrency`` of them at any time."""

    def __init__(self, scenario: Scenario, url: str, keys: Mapping[str, str]) -> None:
        """Prepare the load for the coordinator at ``url``, without /v1. ``keys`` are by account."""
        self._scenario = scenario
        self._url = url
        self._keys = keys
        self._places = threading.Semaphore(scenario.concurrency)

    def run(self) -> tuple[list[LoadResult], float]:
        """Return the answers in the order of the requests, and the seconds from the first start to the last
        end.
        """
        asked = self._scenario.all_asked()
        limits = httpx.Limits(max_connections=None)
        with ExitStack() as stack:
            client = httpx.Client(base_url=self._url, timeout=CLIENT_S, limits=limits, trust_env=False)
            stack.enter_context(client)
            pool = stack.enter_context(ThreadPoolExecutor(self._scenario.concurrency))
            began = time.perf_counter()
            answers = list(pool.map(lambda one: self._ask(client, one), asked))
            return answers, time.perf_counter() - began

    def _ask(self, client: httpx.Client, asked: SimulatedRequest) -> LoadResult:
        answer = LoadResult(asked)
        headers = {"authorization": f"Bearer {self._keys[asked.account]}"}
        with self._places:
            began = time.perf_counter()
            try:
                if self._scenario.stream:
                    body = {**asked.body, "stream": True, "stream_options": {"include_usage": True}}
                    with client.stream(
                        "POST", "/v1/chat/completions", json=body, headers=headers
                    ) as response:
                        _begin(answer, response)
                        _read_stream(answer, response)
                else:
                    response = client.post("/v1/chat/completions", json=asked.body, headers=headers)
                    _begin(answer, response)
                    _read_whole(answer, response.content)
            except (httpx.HTTPError, ValueError) as error:
                answer.error = type(error).__name__
            answer.total_s = time.perf_counter() - began
        return answer


def _begin(answer: LoadResult, response: httpx.Response) -> None:
    answer.status = response.status_code
    answer.provider = response.headers.get("x-convoy-provider", "")
    if timing := response.headers.get("x-timing"):
        answer.timing_us.update(json.loads(timing))


def _read_whole(answer: LoadResult, data: bytes) -> None:
    found = json.loads(data)
    _note(answer, found, "message")
    answer.is_complete = "error" not in found


def _read_stream(answer: LoadResult, response: httpx.Response) -> None:
    if response.status_code != 200:
        _read_whole(answer, response.read())
        return
    for line in response.iter_lines():
        if line.startswith(_TIMING):
            answer.timing_us.update(json.loads(line.removeprefix(_TIMING)))
        elif line == "data: [DONE]":
            answer.is_complete = True
        elif line.startswith("data: "):
            _note(answer, json.loads(line.removeprefix("data: ")), "delta")


def _note(answer: LoadResult, found: dict[str, Any], said: str) -> None:
    """Add the contents of a stream's event, or of a whole answer, to ``answer``."""
    if "error" in found:
        answer.error = str(found["error"].get("code") or found["error"].get("type") or "error")
        return
    answer.response_id = str(found.get("id") or answer.response_id)
    for choice in found.get("choices") or ():
        answer.text += choice[said].get("content") or ""
        answer.ends += choice.get("finish_reason") is not None
    usage = found.get("usage") or {}
    answer.prompt_tokens = int(usage.get("prompt_tokens", answer.prompt_tokens))
    answer.completion_tokens = int(usage.get("completion_tokens", answer.completion_tokens))


def ask_directly(url: str, scenario: Scenario, model: str) -> dict[int, str]:
    """Return the model's own greedy answers to its requests of ``scenario``, by number.

    A head answers each request once, one after the other. Raises `PeerUnreachable`.
    """
    found = {}
    try:
        with httpx.Client(base_url=url, timeout=CLIENT_S, trust_env=False) as client:
            for asked in scenario.all_asked():
                if asked.model == model:
                    response = client.post("/v1/chat/completions", json=asked.body)
                    response.raise_for_status()
                    found[asked.number] = str(response.json()["choices"][0]["message"]["content"] or "")
    except (httpx.HTTPError, ValueError) as error:
        raise PeerUnreachable(f"a head does not answer direct requests: {type(error).__name__}") from None
    return found
