"""A member is taken out of a running cluster of real processes: one command, and when each member notices."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from convoy.config.settings import load_config
from convoy.errors import ConvoyError
from convoy.sdk.options import load_member
from convoy.transport.network import TcpNetwork
from convoy.transport.ports import free_ports
from e2e.served import CONVOY, ENVIRONMENT, convoy, convoy_json

NAMES = ("alpha", "beta", "gamma")
WAIT_S = 240.0

pytestmark = pytest.mark.slow


@dataclass(slots=True)
class Running:
    """Hold a member's process; ``lines`` are those of its standard output, each with its time of arrival."""

    process: subprocess.Popen[str]
    lines: queue.SimpleQueue[tuple[float, str]] = field(default_factory=queue.SimpleQueue)

    def wait_for(self, kind: str) -> tuple[float, str]:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            at_s, line = self.lines.get(timeout=max(0.01, deadline_s - time.monotonic()))
            event = json.loads(line)
            if event["kind"] == kind:
                return at_s, event["text"]

    def num_connections(self) -> int:
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)


class Homes:
    """Hold the files of three machines: each has keys, a convoy.toml and a roster file of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.operator = directory / "operator"
        ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
        for name in NAMES:
            home = directory / name
            card = home / "card.toml"
            home.mkdir()
            address = f"127.0.0.1:{ports[name]}"
            made = convoy(
                "identity",
                "new",
                name,
                "--address",
                address,
                "--dir",
                str(home / "keys"),
                "--card",
                str(card),
            )
            assert made.returncode == 0, made.stderr
        cards = [str(directory / name / "card.toml") for name in NAMES]
        at = ["--operator", str(self.operator), "--out", str(directory / "alpha" / "roster.toml")]
        self.key = convoy_json("roster", "new", "home", *cards, "--head", "alpha", *at)["operator_key"]
        for name in NAMES[1:]:
            shutil.copy(directory / "alpha" / "roster.toml", directory / name / "roster.toml")
        for name in NAMES:
            self.config(name).write_text(self._text(name))

    def config(self, name: str) -> Path:
        return self.directory / name / "convoy.toml"

    def _text(self, name: str) -> str:
        home = self.directory / name
        return (
            f'[cluster]\nname = "{name}"\nidentity = "{home / "keys"}"\nroster = "{home / "roster.toml"}"\n'
            f'operator_key = "{self.key}"\n[listen]\nhost = "127.0.0.1"\n'
            "[model]\nmemory_gb = 1.0\nnum_threads = 1\n[engine]\nnum_blocks = 64\n"
        )


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    return Homes(tmp_path)


@pytest.fixture
def members(homes: Homes) -> Iterator[dict[str, Running]]:
    with ExitStack() as stack:
        running = {
            name: _start(stack, "join", "--config", str(homes.config(name)), "--until-stdin-closes", "--json")
            for name in NAMES[1:]
        }
        for peer in running.values():
            peer.wait_for("listening")
        serve = ["serve", "demo-mini", "--config", str(homes.config("alpha")), "--port", "0", "--json"]
        running["alpha"] = _start(stack, *serve)
        yield running


def _start(stack: ExitStack, *arguments: str) -> Running:
    process = subprocess.Popen(
        [*CONVOY, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    running = Running(process)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            running.lines.put((time.monotonic(), line))

    def stop() -> None:
        assert process.stdin is not None
        process.stdin.close()
        if "serve" in arguments:
            process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()

    threading.Thread(target=read, daemon=True).start()
    stack.callback(stop)
    return running


def _url(head: Running) -> str:
    text = ""
    while True:
        text += head.lines.get(timeout=WAIT_S)[1]
        if text.rstrip().endswith("\n}"):
            url: str = json.loads(text)["url"]
            return url.removesuffix("/v1")


def _stages(url: str) -> dict[str, dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/status", timeout=60) as answer:  # noqa: S310 - our own head
        return {stage["member"]: stage for stage in json.loads(answer.read())["stages"]}


def _when(what: Callable[[], bool]) -> float:
    deadline_s = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)  # another process's connections: there is no event to wait on
    return time.monotonic()


@pytest.mark.long
def test_a_removed_member_is_out_everywhere_and_cannot_come_back(
    homes: Homes, members: dict[str, Running]
) -> None:
    url = _url(members["alpha"])
    before = _stages(url)
    assert set(before) == set(NAMES), "each holds a stage, so the ring links beta and gamma too"
    members["beta"].wait_for("active")
    assert members["gamma"].num_connections() == 4  # two connections each, from the head and from beta
    roster = homes.directory / "alpha" / "roster.toml"  # the head's file, and no other
    done = convoy("roster", "remove", "gamma", "--operator", str(homes.operator), "--roster", str(roster))
    ended_s = time.monotonic()
    assert done.returncode == 0, done.stderr

    out_s = _when(lambda: members["gamma"].num_connections() == 0) - ended_s
    _, why = members["gamma"].wait_for("ended")
    at_s, at_beta = members["beta"].wait_for("active")
    assert why == "alpha closed the link: roster epoch 2 does not list gamma"
    assert at_beta == "alpha -> beta"
    print(
        f"gamma without links {out_s:.3f} s after the command ended; "
        f"a ring without it after {at_s - ended_s:.3f} s"
    )

    # beta says that its plan is active before the head has put it in use
    _when(lambda: set(_stages(url)) == {"alpha", "beta"})
    after = _stages(url)
    assert after["beta"]["link_id"] == before["beta"]["link_id"] is not None
    assert after["beta"]["round_trip_s"] is not None
    assert b"epoch = 2\n" in (homes.directory / "beta" / "keys" / "accepted" / "newest").read_bytes()

    gamma = load_member(load_config(homes.config("gamma")))
    with pytest.raises(ConvoyError):
        TcpNetwork().dial(gamma, gamma.roster.member("beta"), 5.0)
    assert members["gamma"].num_connections() == 0
    assert _stages(url)["beta"]["link_id"] == before["beta"]["link_id"]
