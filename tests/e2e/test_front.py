"""A head whose HTTP runs in a process of its own, as a person sees it with their own tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from e2e.served import Served, served
from support.head_processes import front_of
from support.waiting import wait_until

pytestmark = pytest.mark.slow

ASK = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
MAX_STEPS_BEHIND_A_STOP = 4


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("front"), "demo-mini", "--members", "1", "--http-process") as running:
        yield running


def front(head: Served) -> psutil.Process:
    found = front_of(head.process.pid)
    assert found is not None
    return found


def test_connections_and_the_event_loop_are_in_the_front_process(head: Served) -> None:
    with httpx.stream("POST", f"{head.url}/v1/completions", json=ASK, timeout=60) as stream:
        # Without a name, the iterator would end the stream.
        lines = stream.iter_lines()
        next(lines)
        port = httpx.URL(head.url).port
        ends = {}
        for process in (psutil.Process(head.process.pid), front(head)):
            ends[process.pid] = [
                one
                for one in process.net_connections("tcp")
                if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
            ]
    assert [bool(found) for found in ends.values()] == [False, True]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads libraries as Linux lists them")
def test_the_engines_process_loads_no_event_loop_and_the_front_process_no_torch(head: Served) -> None:
    libraries = [Path(f"/proc/{pid}/maps").read_text() for pid in (head.process.pid, front(head).pid)]
    assert ["/uvloop/" in text for text in libraries] == [False, True]
    assert ["/torch/" in text for text in libraries] == [True, False]


def test_a_killed_front_process_ends_its_stream_and_the_engine_goes_on(head: Served) -> None:
    before, old = httpx.get(f"{head.url}/status", timeout=60).json(), front(head)
    with httpx.stream("POST", f"{head.url}/v1/completions", json=ASK, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        old.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    answer = httpx.post(f"{head.url}/v1/completions", json={"prompt": "Once", "max_tokens": 5}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 5
    after = httpx.get(f"{head.url}/status", timeout=60).json()
    assert (after["generation"], after["recoveries"], after["running"]) == (before["generation"], 0, 0)
    assert after["generated_tokens"] > before["generated_tokens"]
    assert front(head) != old


def test_text_behind_a_stop_string_is_not_sent_billed_or_kept(head: Served) -> None:
    def ask(**fields: object) -> dict[str, Any]:
        body = {"temperature": 0, "ignore_eos": True, **fields}
        answer: dict[str, Any] = httpx.post(f"{head.url}/v1/completions", json=body, timeout=60).json()
        return answer

    def computed() -> int:
        return int(httpx.get(f"{head.url}/status", timeout=60).json()["generated_tokens"])

    prompt = "Once upon a time there was a " * 4
    whole = ask(prompt=prompt, max_tokens=200, cache_salt="a")["choices"][0]["text"]
    # It is within the text, and hardly where a token begins or ends.
    stop, before = whole[37:44], computed()
    stopped = ask(prompt=prompt, max_tokens=200, cache_salt="b", stop=[stop])
    choice, usage = stopped["choices"][0], stopped["usage"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert usage["completion_tokens"] < 100
    assert computed() - before <= usage["completion_tokens"] + MAX_STEPS_BEHIND_A_STOP
    again = ask(prompt=prompt + whole, max_tokens=1, cache_salt="b")["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] // 2 < cached <= usage["prompt_tokens"] + usage["completion_tokens"]


# The last one, because it ends the head of all.
def test_a_front_process_ends_with_a_killed_head(head: Served) -> None:
    process = front(head)
    head.process.kill()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
