"""What others see while an attack runs: streams, one after another, and the health of the server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from adversary.ledger import Row

_NUM_PAIRS, _PAUSE_S = 5, 0.01
# Far above what an idle machine shows, so that a busy one does not fail by chance.
MAX_HEALTH_S = 10.0
# It only bounds a wait.
WAIT_S = 120.0
BODY: dict[str, Any] = {
    "prompt": "a",
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@contextmanager
def others_beside(url: str, row: Row) -> Iterator[None]:
    """Check that each stream ends whole and that health answers in time, for as long as the block runs.

    The first stream has begun before the block does, and the last one ends after it.
    """
    begun, over = threading.Event(), threading.Event()

    def stream() -> float:
        longest_s = 0.0
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=WAIT_S) as answer:
            assert answer.status_code == 200
            lines, since_s = [], time.monotonic()
            for line in answer.iter_lines():
                lines.append(line)
                longest_s = max(longest_s, time.monotonic() - since_s)
                since_s = time.monotonic()
                begun.set()
        assert "data: [DONE]" in lines
        return longest_s

    def health() -> float:
        began_s = time.monotonic()
        answer = httpx.get(f"{url}/health", timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        taken_s = time.monotonic() - began_s
        over.wait(0.1)
        return taken_s

    def repeat(call: Callable[[], float]) -> list[float]:
        taken_s = [call()]
        while not over.is_set():
            taken_s.append(call())
        return taken_s

    with ThreadPoolExecutor(2) as threads:
        streams, healths = threads.submit(repeat, stream), threads.submit(repeat, health)
        try:
            assert begun.wait(WAIT_S)
            yield
        finally:
            over.set()
        gap_s, health_s = max(streams.result()), max(healths.result())
        row.outcomes[f"{len(streams.result())} streams whole"] += 1
        row.outcomes[f"health within {health_s:.1f} s, a stream's longest pause {gap_s:.1f} s"] += 1
        assert health_s < MAX_HEALTH_S


def rate_beside(url: str, row: Row, attack: Callable[[], None]) -> None:
    """Write into the row the best rate of a stream beside the attack, over the best one alone in this run.

    The best ones, because other programs make a stream slower and never faster. Streams with and without
    ``attack`` take turns. While a stream runs, the attack comes again `_PAUSE_S` after it is over: without a
    pause, the attacker takes a core of this machine. Every stream must end with all its tokens. The ratio
    rests on the machine, so it is only shown.
    """
    alone, beside = list[float](), list[float]()
    with ThreadPoolExecutor(1) as threads:
        for _ in range(_NUM_PAIRS):
            alone.append(_tokens_per_s(url))
            over = threading.Event()
            attacking = threads.submit(_repeat, attack, over)
            try:
                beside.append(_tokens_per_s(url))
            finally:
                over.set()
            attacking.result()
    row.outcomes[f"a stream at {max(beside) / max(alone):.2f} of its rate alone"] += 1


def _repeat(attack: Callable[[], None], over: threading.Event) -> None:
    attack()
    while not over.wait(_PAUSE_S):
        attack()


def _tokens_per_s(url: str) -> float:
    """Return the rate of one stream from its first event on."""
    body = {**BODY, "stream_options": {"include_usage": True}}
    events, times_s = [], []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                times_s.append(time.monotonic())
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == BODY["max_tokens"]
    return float(BODY["max_tokens"]) / (times_s[-1] - times_s[0])
