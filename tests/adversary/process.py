"""A victim from the outside: orders go in, events come out, each with a deadline."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

# It only bounds a wait. What takes longer counts as a hang.
WAIT_S = 90.0
ROOT = Path(__file__).parents[2]
Event = dict[str, Any]


class VictimProcess:
    """Run `adversary.victim`, or another module that speaks as it does."""

    def __init__(self, setup: dict[str, Any], module: str = "adversary.victim") -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        }
        self.name: str = setup["name"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._events: dict[tuple[str, str], queue.SimpleQueue[Event]] = defaultdict(queue.SimpleQueue)
        self.crashes: list[Event] = []
        self.heard: list[Event] = []
        self._keys = itertools.count()
        threading.Thread(target=self._read, daemon=True).start()
        self.port = self._wait_until_it_listens()

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def tell(self, do: str, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()

    def wait(self, event: str, key: str = "", timeout_s: float = WAIT_S) -> Event:
        """Return the next event of this kind and key. A wait that is too long counts as a hang and fails."""
        try:
            return self._events[event, key].get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.name}: no event {event!r} for {key!r} in {timeout_s:g} s") from None

    def wait_briefly(self, event: str, key: str, timeout_s: float) -> Event | None:
        """Return the event, or None: it may take longer than an attack wants to wait."""
        try:
            return self._events[event, key].get(timeout=timeout_s)
        except queue.Empty:
            return None

    def now(self, event: str, key: str = "") -> list[Event]:
        """Return all events of this kind that are there already."""
        found = []
        while not self._events[event, key].empty():
            found.append(self._events[event, key].get())
        return found

    def dial(self, peer: str, address: tuple[str, int], timeout_s: float = WAIT_S) -> str:
        """Begin to dial; the key of the link to be."""
        key = f"out {next(self._keys)}"
        self.tell("dial", key=key, peer=peer, port=address[1], timeout_s=timeout_s)
        return key

    def rss_bytes(self) -> int:
        self.tell("state")
        size: int = self.wait("state")["rss_bytes"]
        return size

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait(WAIT_S)

    def wait_either(self, events: tuple[str, ...], key: str, timeout_s: float = WAIT_S) -> Event:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for event in events:
                if not self._events[event, key].empty():
                    return self._events[event, key].get()
            time.sleep(0.002)  # two queues have no common wait
        raise AssertionError(f"{self.name}: none of {events} for {key!r} in {timeout_s:g} s")

    def _wait_until_it_listens(self) -> int:
        """Return its port. A start takes as long as the machine is busy, so no time is a hang here."""
        event = self._events["listening", ""].get()
        assert event["event"] == "listening", f"{self.name} ended before it listened"
        port: int = event["port"]
        return port

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self.heard.append(event)
            if event["event"] == "crashed":
                self.crashes.append(event)
            self._events[event["event"], event.get("key", "")].put(event)
            if event["event"] == "link" and event["key"].startswith("in "):
                self._events["link in", ""].put(event)
        # For one that waits until it listens.
        self._events["listening", ""].put({"event": "ended"})
