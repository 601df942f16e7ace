"""A real front process before an engine that a test controls: it crashes, drains and takes keys."""

from __future__ import annotations

import logging
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from convoy.api.front.host import MAX_PENDING
from convoy.api.front.setup import FrontSetup
from convoy.api.front.supervisor import FrontOptions, FrontServer
from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.api.service import ServedModel, Service
from convoy.cli.running.front import front_command
from convoy.errors import ConfigError, ConvoyError, Unavailable
from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import TokenizerDescription
from support.fake_service import ByteTokenizer, FakeEngine
from support.waiting import wait_until

COMMAND = front_command("warning", "text")
# It says that it serves, and reads nothing.
HUNG = """
import socket, sys, time
from convoy.wire.front import FrontReady, encode_front
kept = socket.socket(fileno=int(sys.argv[1]))
kept.sendall(encode_front(FrontReady()))
time.sleep(600)
"""
KEY = "a-key-of-a-test-with-room"
HEADERS = {"authorization": f"Bearer {KEY}"}
TOKENIZER = TokenizerDescription.read(ModelSource.resolve("demo-mini"))
ASK = {"prompt": "a", "max_tokens": 17, "stream": True, "temperature": 0}

pytestmark = pytest.mark.outside


@dataclass
class Front:
    """Hold a running server, its engine, and what it has told."""

    server: FrontServer
    engine: FakeEngine
    ready: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    drained: list[int] = field(default_factory=list)
    cut: queue.SimpleQueue[int | ConvoyError] = field(default_factory=queue.SimpleQueue)
    url: str = ""

    def run(self) -> None:
        service = Service(
            (ServedModel("fake", self.engine, ByteTokenizer()),), lambda: (True, "it runs"), lambda: {"n": 1}
        )
        try:
            cut = self.server.run(
                service,
                TOKENIZER,
                on_ready=self.ready.put,
                on_stop=lambda: None,
                on_drain=lambda number, _: self.drained.append(number),
            )
        except ConvoyError as error:
            self.cut.put(error)
        else:
            self.cut.put(cut)

    def process(self) -> psutil.Process:
        assert self.server.pid is not None
        return psutil.Process(self.server.pid)

    def status(self, headers: dict[str, str] = HEADERS) -> int:
        return httpx.get(f"{self.url}/v1/models", headers=headers, timeout=60).status_code


@contextmanager
def front(
    keys: KeyRing | None = None,
    command: tuple[str, ...] = COMMAND,
    *,
    drain_s: float = 20.0,
    end_s: float = 10.0,
    max_pending: int = MAX_PENDING,
) -> Iterator[Front]:
    options = ServeOptions(port=0, drain_s=drain_s, keys=keys)
    setup = FrontSetup.of(options, None)
    started = FrontOptions(command, wait_s=0.01, end_s=end_s, max_pending=max_pending)
    with FrontServer(started, options, setup) as server:
        made = Front(server, FakeEngine(reply="The answer is 42."))
        thread = threading.Thread(target=made.run, name="front")
        thread.start()
        try:
            yield made
        finally:
            made.server.request()
            made.server.request()
            made.engine.close()
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    file = tmp_path_factory.mktemp("keys") / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    with front(KeyRing.open(file)) as made:
        made.url = made.ready.get(timeout=60)
        yield made


def test_an_answer_is_streamed_from_the_engine(served: Front) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json=ASK, headers=HEADERS, timeout=60)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert served.engine.handles[-1].request.prompt_ids


def test_keys_of_the_file_and_of_a_part_of_the_engines_process_are_admitted(served: Front) -> None:
    assert served.status({}) == 401
    assert served.status() == 200
    own = served.server.own_key("provider")
    wait_until(lambda: served.status({"authorization": f"Bearer {own}"}) == 200)


def test_the_front_process_leaves_signals_to_the_engines_process(served: Front) -> None:
    process = served.process()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert served.status() == 200
    assert served.process() == process


def test_a_crash_ends_its_streams_alone_and_the_next_request_is_answered(
    served: Front, caplog: pytest.LogCaptureFixture
) -> None:
    own = served.server.own_key("provider")
    engine, first = served.engine, served.process()
    engine.pause_after = 3
    engine.paused.clear()
    with (
        caplog.at_level(logging.WARNING, "convoy.api.front"),
        httpx.stream("POST", f"{served.url}/v1/completions", json=ASK, headers=HEADERS, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert engine.paused.wait(10)
        first.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert engine.handles[-1].aborted.wait(10)
    engine.pause_after = None
    assert served.status() == 200
    assert served.status({"authorization": f"Bearer {own}"}) == 200
    answer = httpx.post(f"{served.url}/v1/completions", json=ASK, headers=HEADERS, timeout=60)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert served.process() != first
    assert served.ready.empty()
    assert "status=-9 lost_requests=1; it starts again in wait_s=0" in caplog.text


def test_a_drain_lets_an_answer_end_and_a_second_request_cuts_it() -> None:
    with front() as made:
        url = made.ready.get(timeout=60)
        made.engine.pause_after = 3
        with httpx.stream("POST", f"{url}/v1/completions", json=ASK, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            made.server.request()
            wait_until(lambda: made.drained == [1])
            assert made.cut.empty()
            made.server.request()
            said = "\n".join(lines)
        assert "draining" in said
        assert "[DONE]" not in said
        assert made.cut.get(timeout=30) == 1


def test_a_front_process_that_never_serves_ends_the_start_with_its_reason() -> None:
    with front(command=(sys.executable, "-c", "")) as made:
        error = made.cut.get(timeout=60)
    assert isinstance(error, Unavailable)
    assert "ended 3 times before it served" in error.message


def test_a_front_process_that_the_system_refuses_to_start_counts_as_a_crash() -> None:
    with front(command=("an-absent-program",)) as made:
        error = made.cut.get(timeout=60)
    assert isinstance(error, Unavailable)
    assert "ended 3 times before it served" in error.message


def test_a_hung_front_process_is_ended_once_its_drain_is_over(caplog: pytest.LogCaptureFixture) -> None:
    with front(command=(sys.executable, "-c", HUNG), drain_s=0.0, end_s=0.1) as made:
        made.ready.get(timeout=60)
        made.server.request()
        assert made.cut.get(timeout=60) == 0
    assert "did not end within its drain: lost_requests=0" in caplog.text


def test_a_front_process_that_reads_nothing_is_killed_and_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    hung = (sys.executable, "-c", HUNG)
    with front(KeyRing.open(file), hung, drain_s=0.0, end_s=0.1, max_pending=50) as made:
        made.ready.get(timeout=60)
        first = made.server.pid
        # More than the socket holds.
        while made.server.pid == first:
            made.server.own_key("a part with a long name " * 1000)
        wait_until(lambda: "status=-9" in caplog.text)
    assert "it does not read: max_pending=50" in caplog.text


def test_the_reason_of_a_front_process_that_cannot_serve_is_told() -> None:
    options = ServeOptions(port=0)
    setup = FrontSetup.of(options, "ftp://127.0.0.1:1")
    with FrontServer(FrontOptions(COMMAND), options, setup) as server:
        made = Front(server, FakeEngine())
        made.run()
        error = made.cut.get_nowait()
    assert isinstance(error, ConfigError)
    assert "ftp://127.0.0.1:1" in error.message
