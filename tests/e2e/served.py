"""A real head and real peers as processes, for tests that a user could have typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CONVOY = [sys.executable, "-m", "convoy"]
START_WAIT_S = 240.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def convoy(*arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*CONVOY, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=ENVIRONMENT,
        check=False,
    )


def convoy_json(*arguments: str) -> dict[str, Any]:
    done = convoy(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@dataclass(frozen=True, slots=True)
class Served:
    """Hold a served model: ``process`` is the head; ``url`` has no /v1."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def peers(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "join" in p.cmdline()]


@contextmanager
def served(directory: Path, *arguments: str) -> Iterator[Served]:
    """Run `convoy run ...` until the block ends; then send SIGTERM, and check that nothing is left."""
    log = directory / "head.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*CONVOY, "run", *arguments, "--port", "0", "--json"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
        )
    try:
        yield Served(_wait_for_url(log, process), process, log)
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=60)
        for child in alive:
            child.kill()
        assert not alive, "members outlived their head"


def _wait_for_url(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_WAIT_S
    poll = 0.1
    while time.monotonic() < deadline:
        text = log.read_text()
        start = text.find("{\n")
        if start >= 0 and text.rstrip().endswith("}"):
            url: str = json.loads(text[start:])["url"]
            return url.removesuffix("/v1")
        assert process.poll() is None, text
        time.sleep(poll)  # a file has no event to wait on
    raise AssertionError(f"not served within {START_WAIT_S:g} s: {log.read_text()}")
