"""The head is killed: its streams end as broken, never as complete, and its peers wait without working."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from e2e.served import served
from e2e.test_removal import Homes, _start, _url
from survival.losing import WAIT_S, wait_for

pytestmark = pytest.mark.slow
NAMES = ("alpha", "beta", "gamma")
LOOK_S = 3.0


def ask(url: str, num_tokens: int) -> urllib.request.Request:
    body = {
        "messages": [{"role": "user", "content": "Tell me a story about a dog."}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/chat/completions", data, headers)  # noqa: S310 - our own head


class Reader:
    """Read a stream on a thread: keep its text, and how it ended."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self.lines: list[bytes] = []
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._request = ask(url, num_tokens)
        threading.Thread(target=self._read, daemon=True).start()

    def has(self, num_lines: int) -> bool:
        return len(self.lines) > num_lines

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=WAIT_S) as answer:  # noqa: S310 - our own head
                self.lines.extend(line for line in answer if line.strip())
        except BaseException as error:  # noqa: BLE001 - http.client has errors of its own; the test looks at it
            self.error = error
        finally:
            self.ended.set()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def most_cpu_s(watched: list[psutil.Process]) -> float:
    """Return the most CPU seconds that any of these processes uses in the next `LOOK_S` seconds."""
    before_s = [cpu_s(process) for process in watched]
    # In this time, one that does not wait quietly would work.
    time.sleep(LOOK_S)
    return max(cpu_s(process) - before for process, before in zip(watched, before_s, strict=True))


def test_a_killed_head_ends_its_streams_as_broken_and_its_peers_wait_idle_for_the_next(
    tmp_path: Path,
) -> None:
    homes = Homes(tmp_path)
    with ExitStack() as stack:
        peers = {
            name: _start(stack, "join", "--config", str(homes.config(name)), "--until-stdin-closes", "--json")
            for name in NAMES[1:]
        }
        for peer in peers.values():
            peer.wait_for("listening")
        serve = ["serve", "demo-mini", "--config", str(homes.config("alpha")), "--port", "0", "--json"]
        head = _start(stack, *serve)
        reader = Reader(_url(head), 900)
        wait_for(lambda: len(reader.lines) > 5)
        head.process.kill()
        assert reader.ended.wait(WAIT_S)
        assert not any(b"[DONE]" in line for line in reader.lines)
        assert not any(b'"finish_reason":"' in line for line in reader.lines)
        for peer in peers.values():
            peer.wait_for("lost")
        watched = [psutil.Process(peer.process.pid) for peer in peers.values()]
        # Their work on what they had ends first.
        wait_for(lambda: most_cpu_s(watched) < 0.05 * LOOK_S)
        # A peer that works in bursts is quiet once, and not again.
        used_s = most_cpu_s(watched)
        print(f"peers without a head used {used_s / LOOK_S:.1%} of a core")
        assert used_s < 0.05 * LOOK_S
        again = _start(stack, *serve)
        second = Reader(_url(again), 20)
        assert second.ended.wait(WAIT_S)
        assert second.error is None
        assert any(b"[DONE]" in line for line in second.lines)


def test_a_stream_over_http_survives_a_killed_peer(tmp_path: Path) -> None:
    with served(tmp_path, "demo", "--members", "3") as head:
        texts = []
        for kill in (False, True):
            reader = Reader(head.url, 200)
            if kill:
                wait_for(partial(reader.has, 20))
                os.kill(head.peers()[-1].pid, signal.SIGKILL)
            assert reader.ended.wait(WAIT_S)
            assert reader.error is None
            assert reader.lines[-1].strip() == b"data: [DONE]"
            chunks = [json.loads(line[6:]) for line in reader.lines[:-1] if line.startswith(b"data: {")]
            texts.append(
                "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
            )
        assert texts[0] == texts[1]
        with urllib.request.urlopen(f"{head.url}/status", timeout=WAIT_S) as answer:  # noqa: S310 - our own head
            status = json.loads(answer.read())
        assert status["recoveries"] == 1
        assert len(status["stages"]) == 2
