"""A server ends on its second signal, whatever its threads do: real processes, and real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

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


@pytest.mark.parametrize("what", ["tokenizer", "health", "stop", "close"])
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
