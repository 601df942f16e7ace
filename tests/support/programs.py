"""Programs of a fleet as a person starts them, each with its output in a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_S = 240.0


class Program:
    """Run ``convoy ARGUMENTS`` in ``folder``. `stop` ends it as a person would."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "convoy", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, text: str) -> None:
        """Wait until ``text`` is in its output."""
        end_s = time.monotonic() + START_S
        while text not in self.said():
            assert self.process.poll() is None, f"it ended: {self.said()[-2000:]}"
            assert time.monotonic() < end_s, f"{text!r} was not said: {self.said()[-2000:]}"
            time.sleep(0.02)

    def ready(self) -> dict[str, Any]:
        """Return the ready event that it prints with --json once it listens."""
        self.until('{"event": "ready"')
        line = next(line for line in self.said().splitlines() if line.startswith('{"event": "ready"'))
        found: dict[str, Any] = json.loads(line)
        return found

    def memory(self) -> bytes:
        """Return all memory that it may write to, on Linux, which is where its texts lie."""
        found = bytearray()
        with Path(f"/proc/{self.process.pid}/mem").open("rb", buffering=0) as mem:
            for line in Path(f"/proc/{self.process.pid}/maps").read_text().splitlines():
                span, rights, *_ = line.split()
                if not rights.startswith("rw"):
                    continue
                start, end = (int(part, 16) for part in span.split("-"))
                mem.seek(start)
                try:
                    found += mem.read(end - start)
                # A guard page, or memory that was given back meanwhile.
                except OSError:
                    continue
        return bytes(found)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
