"""Two machines, one command on each: an invitation crosses by hand, and the model runs over both."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.namespaces import Machine, two_machines, why_no_namespaces

WAIT_S = 120.0
POLL_S = 0.1
NO_NAMESPACES = why_no_namespaces()
pytestmark = pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES))
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"),
}


CONVOY = (sys.executable, "-m", "convoy")


class Running:
    """Hold a command on one machine, in a folder of its own, with its output in files."""

    def __init__(
        self, machine: Machine, folder: Path, *arguments: str, command: Sequence[str] = CONVOY
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._verb = arguments[0]
        self._files = [(folder / f"{self._verb}.{name}").open("wb") for name in ("out", "err")]
        self.process = subprocess.Popen(
            machine.run_in(*command, *arguments),
            cwd=folder,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=self._files[0],
            stderr=self._files[1],
        )

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def text(self, name: str) -> str:
        return (self.folder / f"{self._verb}.{name}").read_text()

    def wait_for(self, name: str, pattern: str) -> str:
        """Return the first group of the pattern, once the output has it."""
        found: re.Match[str] = until(lambda: re.search(pattern, self.text(name)), self)
        return found.group(1)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        for file in self._files:
            file.close()


def until(condition: Callable[[], Any], running: Running) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (value := condition()) is not None:
            return value
        assert running.process.poll() is None, running.text("out") + running.text("err")
        time.sleep(POLL_S)  # a file has no event to wait on
    raise AssertionError(running.text("out") + running.text("err"))


@contextmanager
def running(
    machine: Machine, folder: Path, *arguments: str, command: Sequence[str] = CONVOY
) -> Iterator[Running]:
    started = Running(machine, folder, *arguments, command=command)
    try:
        yield started
    finally:
        started.end()


def ask(machine: Machine, url: str, question: str) -> str:
    """Ask for a chat completion over HTTP, from a process on that machine."""
    body = {
        "model": "demo-mini",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
    }
    code = (
        "import sys, urllib.request as r;"
        "print(r.urlopen(r.Request(sys.argv[1], sys.argv[2].encode(), {'content-type': 'application/json'}),"
        " timeout=60).read().decode())"
    )
    done = subprocess.run(
        machine.run_in(sys.executable, "-c", code, f"{url}/chat/completions", json.dumps(body)),
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    answer: str = json.loads(done.stdout)["choices"][0]["message"]["content"]
    return answer


def status(machine: Machine, url: str) -> dict[str, Any]:
    done = subprocess.run(
        machine.run_in(sys.executable, "-m", "convoy", "status", "--url", url, "--json"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.long
def test_two_machines_join_by_invitation_with_one_command_each(tmp_path: Path) -> None:
    serve = ("serve", "demo-mini", "--invite", "--auto-approve", "--name", "alpha", "--port", "8765")
    with two_machines() as (first, second), running(first, tmp_path / "a", *serve) as head:
        token = head.wait_for("out", r"(convoy1[a-z2-7]+)\n")
        with running(second, tmp_path / "b", "join", "-", "--name", "beta") as peer:
            peer.say(f"{token}\n")
            url = head.wait_for("err", r"serving demo-mini at (http://\S+)/v1")
            assert ask(first, f"{url}/v1", "What is 2+3?") == "5"
            picture = status(first, url)
            assert [stage["member"] for stage in picture["stages"]] == ["alpha", "beta"]
            assert picture["stages"][1]["address"] == "192.0.2.2:7777"
            assert picture["stages"][1]["sealed_bytes_received"] > 0
            assert "the first machine that presents this token gets in" in head.text("err")
            assert re.search(r"code: (\d{4} \d{4})", head.text("err"))
            both = [re.search(r"code: (\d{4} \d{4})", side.text("err")) for side in (head, peer)]
            assert len({code.group(1) for code in both if code is not None}) == 1
            assert token not in head.text("err") + peer.text("out") + peer.text("err")
            for process in (head, peer):
                assert token not in Path(f"/proc/{process.process.pid}/cmdline").read_text()


@pytest.mark.long
def test_the_operator_compares_the_codes_and_says_yes(tmp_path: Path) -> None:
    serve = ("serve", "demo-mini", "--invite", "--name", "alpha", "--json")
    with two_machines() as (first, second), running(first, tmp_path / "a", *serve) as head:
        token = head.wait_for("out", r'"token": "(convoy1[a-z2-7]+)"')
        with running(second, tmp_path / "b", "join", "-", "--name", "beta", "--json") as peer:
            peer.say(f"{token}\n")
            asked = head.wait_for("out", r'"event": "confirm".*"code": "(\d{4} \d{4})"')
            assert peer.wait_for("out", r'"kind": "code", "text": "(\d{4} \d{4})') == asked
            assert not (peer.folder / ".convoy" / "roster.toml").exists()
            head.say("y\n")
            url = head.wait_for("out", r'"url": "(http://[^"]+)"')
            assert ask(first, url, "What is 4+3?") == "7"
            _third_comes_in(first, second, tmp_path)
            peer.wait_for("out", r'"text": "(alpha -> beta)"')
            assert ask(first, url, "What is 4+3?") == "7"
            assert "lost" not in peer.text("out")


def _third_comes_in(first: Machine, second: Machine, tmp_path: Path) -> None:
    """Add a third member to the running cluster: members take the new roster and keep their links."""
    invite = ("invite", "--auto-approve", "--address", first.address)
    with running(first, tmp_path / "a", *invite) as operator:
        token = operator.wait_for("out", r"(convoy1[a-z2-7]+)\n")
        with running(second, tmp_path / "c", "join", "-", "--name", "gamma", "--port", "7779") as third:
            third.say(f"{token}\n")
            third.wait_for("err", r"(listening: gamma)")
            assert operator.process.wait(30) == 0
            newest = (tmp_path / "a" / ".convoy" / "roster.toml").read_bytes()
            accepted = tmp_path / "b" / ".convoy" / "identity" / "accepted" / "newest"
            until(lambda: accepted.read_bytes().endswith(newest) or None, third)


def started_again(machine: Machine, folder: Path) -> AbstractContextManager[Running]:
    """Run the command of the member's unit, as systemd does after a reboot."""
    print_unit = [*CONVOY, "service", "install", "--print"]
    done = subprocess.run(
        print_unit, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True
    )
    unit = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert unit["WorkingDirectory"] == str(folder)
    python, *words = shlex.split(unit["ExecStart"])
    verb = next(index for index, word in enumerate(words) if word in {"serve", "join"})
    return running(machine, folder, *words[verb:], command=[python, *words[:verb]])


def picture_of(machine: Machine, url: str) -> list[tuple[str, str]]:
    """Return the members of the plan that runs, with the fingerprints of their keys."""
    return [(stage["member"], stage["fingerprint"]) for stage in status(machine, url)["stages"]]


@pytest.mark.long
def test_two_machines_stay_one_cluster_over_the_loss_of_power_of_either(tmp_path: Path) -> None:
    serve = ("serve", "demo-mini", "--invite", "--auto-approve", "--name", "alpha")
    with two_machines() as (first, second), ExitStack() as stack:
        head = stack.enter_context(running(first, tmp_path / "a", *serve))
        token = head.wait_for("out", r"(convoy1[a-z2-7]+)\n")
        peer = stack.enter_context(running(second, tmp_path / "b", "join", "-", "--name", "beta"))
        peer.say(f"{token}\n")
        url = head.wait_for("err", r"serving demo-mini at (http://\S+)/v1")
        before = picture_of(first, url)
        assert [member for member, _ in before] == ["alpha", "beta"]
        roster = (tmp_path / "a" / ".convoy" / "roster.toml").read_bytes()

        second.end_processes()
        head.wait_for("err", r"(lost: beta)")
        peer = stack.enter_context(started_again(second, tmp_path / "b"))
        head.wait_for("err", r"in use: .*-> (beta)")
        assert ask(first, f"{url}/v1", "What is 2+3?") == "5"
        assert picture_of(first, url) == before

        first.end_processes()
        peer.wait_for("err", r"(lost|ended): ")
        head = stack.enter_context(started_again(first, tmp_path / "a"))
        head.wait_for("err", r"serving demo-mini at (http://\S+)/v1")
        assert ask(first, f"{url}/v1", "What is 4+3?") == "7"
        assert picture_of(first, url) == before
        for folder in ("a", "b"):
            assert (tmp_path / folder / ".convoy" / "roster.toml").read_bytes() == roster
