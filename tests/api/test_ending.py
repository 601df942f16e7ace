"""A server ends on its second signal, whatever its threads do: real processes, and real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from convoy.api.ending import arm_at_second
from support.cases import cases

SERVER = """
import sys, threading
from convoy.cli import main
from convoy.api import ending
from convoy.api.listen.options import ServeOptions
from convoy.api.server import run_server
from convoy.api.service import ServedModel, Service
from support.fake_service import ByteTokenizer, FakeEngine

what = sys.argv[1]

def stuck(*_arguments, **_options):
    print("stuck", flush=True)
    threading.Event().wait()

class Stuck(ByteTokenizer):
    encode = stuck

def command(**_options):
    service = Service(
        (ServedModel("fake", FakeEngine(), Stuck()),), stuck if what == "health" else lambda: (True, ""), dict
    )
    try:
        run_server(
            service,
            ServeOptions(port=0, drain_s=60.0),
            on_ready=lambda url: print(url, flush=True),
            on_stop=stuck if what == "stop" else lambda: None,
        )
    finally:
        if what == "close":
            stuck()

ending.END_S = 2.0
main.app.registered_commands.clear()
main.app.command("serve")(lambda: command())
main.main(["serve"])
"""


MANY = """
import itertools, os, signal, threading
from convoy.api.ending import on_signals

enough = threading.Event()
count = itertools.count(1)

def asked():
    if next(count) == 500:
        enough.set()

def send():
    while not enough.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

on_signals(asked)
threading.Thread(target=send).start()
while not enough.wait(0.01):
    pass
os._exit(0)
"""


def test_signals_without_end_do_not_stop_an_orderly_end() -> None:
    assert subprocess.run([sys.executable, "-c", MANY], check=False).returncode == 0


def test_a_process_is_armed_at_its_second_signal_alone() -> None:
    calls: list[int] = []
    arm = arm_at_second(lambda: calls.append(len(signals)))
    signals: list[int] = []
    for number in range(1, 6):
        signals.append(number)
        arm()
    assert calls == [2]


@pytest.mark.parametrize(
    "what", cases(["tokenizer", "health", "stop", "close"], ("tokenizer", "close").__contains__)
)
def test_a_server_ends_on_the_second_signal_though_a_thread_is_stuck(what: str) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root / "tests")])
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER, what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        asking = ask(url, what)
        if asking is None:
            child.send_signal(signal.SIGTERM)
        assert child.stdout.readline().strip() == "stuck"
        if asking is not None:
            child.send_signal(signal.SIGTERM)
        # Two pending signals of one kind would be one, so the second is of the other kind.
        child.send_signal(signal.SIGINT)
        assert child.wait(90) in {0, 1, 130}
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def ask(url: str, what: str) -> httpx.Client | None:
    """Send the request that gets stuck, where there is one, without waiting for its answer."""
    if what in {"stop", "close"}:
        return None
    client = httpx.Client(base_url=url, timeout=httpx.Timeout(60.0, read=0.5))
    with client, pytest.raises(httpx.ReadTimeout):
        client.get("/health") if what == "health" else client.post("/v1/completions", json={"prompt": "x"})
    return client
