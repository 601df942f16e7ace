"""A peer and a provider end on the second signal, whatever their threads do: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, signal, sys, threading
from convoy.cli import join, main
from convoy.fleet.provider import run
from convoy.fleet.provider.provide import ProvideOptions
from convoy.api import ending

SIGNALS = {signal.SIGTERM, signal.SIGINT}

def take_signals():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Event().wait()

def stuck(*_arguments):
    print("stuck", flush=True)
    threading.Event().wait()

class Peer:
    run = stuck

    def stop(self):
        print("asked", flush=True)

class Provider:
    def __init__(self, *_arguments):
        pass

    async def run(self):
        asyncio.get_running_loop().call_later(0, print, "stuck")
        await asyncio.Event().wait()

    def drain(self):
        print("asked", flush=True)

class Engine:
    async def close(self):
        pass

def options(offers):
    # Nothing listens there.
    return ProvideOptions("ws://127.0.0.1:1", offers)

async def measure(*_arguments):
    return {}

def command():
    # The system delivers signals to another thread, so no wait of the main thread is interrupted.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=take_signals, daemon=True).start()
    if sys.argv[1] == "join":
        join._run_until_asked(Peer(), ("127.0.0.1", 0), False)
    else:
        run.Provider, run._measure = Provider, measure
        run.provide_until_drained(None, Engine(), options, models=None, slots=1, say=print)

ending.END_S = 2.0
sys.stdout.reconfigure(line_buffering=True)
main.app.registered_commands.clear()
main.app.command("serve")(lambda: command())
main.main(["serve"])
"""


@pytest.mark.parametrize("what", ["join", "provide"])
def test_the_second_signal_ends_a_process_that_is_stuck(what: str) -> None:
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "stuck\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "asked\n"
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 1
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
