"""Both machines end at once, as in a power cut, and their services start again as the same cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import convoy
from cli.transcript import run_here
from convoy.sdk.endpoint import Endpoint
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.transport.ports import free_port
from support.notified import notify_socket

QUESTION = "What is 27+58? Answer with just the number."


def command_of(home: Path, *words: str) -> list[str]:
    """Return the ExecStart of the service of the member in ``home``."""
    done = run_here(["service", "install", "--print", "--dir", str(home), *words], home)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


@contextmanager
def started(command: list[str], home: Path) -> Iterator[None]:
    """Start a service as systemd does, and wait until it is ready. Kill all its processes at the end."""
    with notify_socket() as notify, (home / "log").open("ab") as log:
        environment = {**os.environ, "NOTIFY_SOCKET": notify.address, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            notify.until("READY=1")
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_services_of_two_machines_start_again_as_the_same_cluster(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    commands = {}
    with LocalCluster(LocalOptions(num_members=2, serve_port=port)) as local:
        for name, words in (("beta", []), ("alpha", ["demo-mini"])):
            home = tmp_path / name
            home.mkdir()
            shutil.copy(local.config_file(name), home / "convoy.toml")
            commands[name] = command_of(home, *words)
        seen = []
        for _ in range(2):
            with ExitStack() as stack:
                for name, command in commands.items():
                    stack.enter_context(started(command, tmp_path / name))
                status = Endpoint(url).get("/status")
                assert isinstance(status, dict)
                seen.append(
                    (
                        [stage["fingerprint"] for stage in status["stages"]],
                        [(stage["member"], stage["start"], stage["end"]) for stage in status["stages"]],
                        convoy.connect(url).chat(QUESTION).text,
                    )
                )
    assert seen[0] == seen[1]
    assert [stage[0] for stage in seen[0][1]] == ["alpha", "beta"]
