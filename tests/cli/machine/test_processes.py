"""`convoy ps`, `stop` and `logs`, and `convoy` without arguments."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.cli.running.process import ProcessRecord, running_processes
from convoy.sdk.local_cluster import LocalCluster, LocalOptions

# A process that announces itself as `serve` does, and ends when it is asked to.
PROGRAM = """
import signal, sys
from pathlib import Path
from convoy.cli.running.process import announced
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with announced(sys.argv[2], sys.argv[3], Path(sys.argv[1])) as here:
    here.ready("serves demo", "http://127.0.0.1:9000" if sys.argv[2] == "serve" else None)
    print("ready", flush=True)
    signal.pause()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the list of processes and the units apart from those of the person that runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "cache"


@contextmanager
def announcing(folder: Path, verb: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that announces itself with the files of ``folder``."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), verb, name], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def alpha(tmp_path: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    with announcing(tmp_path, "serve", "alpha") as process:
        yield process


def test_a_running_process_is_listed_and_stopped(tmp_path: Path, alpha: subprocess.Popen[str]) -> None:
    (listed,) = json.loads(run_here(["ps", "--json"], tmp_path).stdout)
    assert (listed["pid"], listed["name"], listed["state"]) == (alpha.pid, "alpha", "serves demo")
    assert "alpha" in run_here(["ps"], tmp_path).stdout
    wrong = run_here(["stop", "beta"], tmp_path)
    assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (
        2,
        f"error: 'beta' names 0 processes, expected one: running are alpha ({alpha.pid}, folder {tmp_path})",
    )
    done = run_here(["stop", "alpha"], tmp_path)
    assert (done.returncode, done.stderr) == (
        0,
        f"stopped alpha (serve, process {alpha.pid}, folder {tmp_path})\n",
    )
    assert alpha.wait(30) == 0
    assert run_here(["ps", "--json"], tmp_path).stdout == "[]\n"


def test_a_process_whose_parent_does_not_ask_for_its_end_is_stopped(
    tmp_path: Path, alpha: subprocess.Popen[str]
) -> None:
    # As in a container without an init.
    command = [sys.executable, "-m", "convoy", "stop", "alpha", "--wait", "5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        0,
        f"stopped alpha (serve, process {alpha.pid}, folder {tmp_path})\n",
    )


def test_stop_without_a_name_ends_only_a_process_of_this_folder(
    tmp_path: Path, alpha: subprocess.Popen[str]
) -> None:
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    refused = run_here(["stop"], elsewhere)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "error: this folder has 0 processes, expected one: "
        f"running are alpha ({alpha.pid}, folder {tmp_path})",
        "hint: convoy stop NAME, convoy stop PID, or --all",
    ]
    assert alpha.poll() is None
    done = run_here(["stop"], tmp_path)
    assert (done.returncode, done.stderr) == (
        0,
        f"stopped alpha (serve, process {alpha.pid}, folder {tmp_path})\n",
    )
    assert alpha.wait(30) == 0


def test_a_head_is_listed_with_the_folder_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    monkeypatch.setattr("convoy.cli.serve.serve_cluster", lambda *given, **_: seen.append(given[2].folder))
    with LocalCluster(LocalOptions(num_members=1)) as local:
        config = local.config_file("alpha")
        assert run_here(["serve", "demo", "--config", str(config)], tmp_path).returncode == 0
        assert run_here(["serve", "demo"], tmp_path).returncode == 0
    # Without a cluster there is no folder .convoy.
    assert seen == [config.parent, Path()]


def test_a_coordinator_a_provider_and_a_proxy_are_listed_while_they_run(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ProcessRecord] = []

    def look() -> None:
        seen.extend(running_processes())

    def route(*_: object, on_ready: Callable[[str, str, int], None], **__: object) -> int:
        on_ready("http://127.0.0.1:8780", "http://127.0.0.1:8781", 0)
        look()
        return 0

    def seal(*_: object, on_ready: Callable[[str], None], **__: object) -> int:
        on_ready("http://127.0.0.1:8770")
        look()
        return 0

    def provide(*_: object, say: Callable[[str, str], None], **__: object) -> None:
        for kind, text in (
            ("measuring", "measuring demo"),
            ("coordinator", "the coordinator says: no demo at wss://ann:secret@example.org"),
            ("coordinator", "waiting for approval: convoy coordinator providers --approve 91f6 NAME"),
            ("coordinator", "registered as alpha"),
        ):
            say(kind, text)
            look()

    monkeypatch.setattr("convoy.fleet.coordinator.server.run_coordinator", route)
    monkeypatch.setattr("convoy.fleet.proxy.server.run_proxy", seal)
    monkeypatch.setattr("convoy.fleet.provider.run.provide_until_drained", provide)
    monkeypatch.setenv("CONVOY_API_KEY", "sk-test")
    url, key = "ws://127.0.0.1:8780", bytes(32).hex()
    for words in (
        ["coordinator", "--instance", "west"],
        ["proxy", "http://127.0.0.1:8780", "--trust-provider", key],
        ["provide", url],
    ):
        done = run_here(words, tmp_path)
        assert done.returncode == 0, done.stderr
    assert [(one.verb, one.name, one.state) for one in seen] == [
        ("coordinator", "west", "routes requests at http://127.0.0.1:8780/v1"),
        ("proxy", "proxy", "seals requests at http://127.0.0.1:8770/v1"),
        ("provide", "provide", "measuring"),
        # Reports hold the state, and no name or reason.
        ("provide", "provide", "tries again"),
        ("provide", "provide", "waits for approval"),
        ("provide", "provide", "registered"),
    ]
    home = tmp_path / ".convoy"
    assert [one.folder for one in seen] == [str(home / "coordinator"), str(tmp_path), *[str(home)] * 4]
    assert running_processes() == []


def test_stop_without_a_name_ends_the_coordinator_of_this_folder(tmp_path: Path, cache: Path) -> None:
    with announcing(tmp_path / ".convoy" / "coordinator", "coordinator", "west") as west:
        done = run_here(["stop"], tmp_path)
        assert done.returncode == 0, done.stderr
        assert west.wait(30) == 0


def test_stop_takes_a_name_or_all_and_not_both(tmp_path: Path, alpha: subprocess.Popen[str]) -> None:
    done = run_here(["stop", "alpha", "--all"], tmp_path)
    assert done.returncode == 2
    assert "'alpha' and --all both say what to stop" in done.stderr
    assert alpha.poll() is None


def test_a_killed_process_is_not_listed(tmp_path: Path, alpha: subprocess.Popen[str]) -> None:
    alpha.kill()
    alpha.wait(30)
    assert "no process of Convoy runs here" in run_here(["ps"], tmp_path).stderr


def test_a_log_needs_a_service(tmp_path: Path, cache: Path) -> None:
    done = run_here(["logs"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: which service? installed are none\n")


def steps(tmp_path: Path) -> list[str]:
    """Return the commands that `convoy` names in ``tmp_path``."""
    done = run_here([], tmp_path)
    assert done.returncode == 0, done.stderr
    _, _, below = done.stdout.partition("\nnext:\n")
    return [line.strip().split("  ")[0] for line in below.splitlines()]


def test_a_machine_without_a_cluster_is_told_how_to_get_one(tmp_path: Path, cache: Path) -> None:
    assert steps(tmp_path) == [
        "convoy demo",
        "convoy run MODEL",
        "convoy serve MODEL --invite",
        "convoy join -",
        "convoy --help",
    ]


def test_a_machine_that_serves_is_told_how_to_use_it(tmp_path: Path, alpha: subprocess.Popen[str]) -> None:
    assert steps(tmp_path)[0] == "convoy chat --url http://127.0.0.1:9000"
    assert f"alpha ({alpha.pid}): serves demo" in run_here([], tmp_path).stdout


def test_a_machine_with_a_proxy_is_told_how_to_get_a_cluster_too(tmp_path: Path, cache: Path) -> None:
    with announcing(tmp_path, "proxy", "proxy"):
        assert steps(tmp_path)[0] == "convoy demo"
        with announcing(tmp_path, "join", "beta"):
            assert steps(tmp_path)[0] == "convoy ps"


def test_a_member_is_named_with_its_cluster_and_how_to_start_it(tmp_path: Path, cache: Path) -> None:
    home = tmp_path / ".convoy"
    home.mkdir()
    with LocalCluster(LocalOptions(num_members=2)) as local:
        shutil.copy(local.config_file("beta"), home / "convoy.toml")
        assert steps(tmp_path)[:2] == ["convoy join", "convoy service install"]
        assert "beta, a peer of local" in run_here([], tmp_path).stdout
        shutil.copy(local.config_file("alpha"), home / "convoy.toml")
        assert steps(tmp_path)[:2] == ["convoy serve MODEL", "convoy service install MODEL"]
        (local.directory / "roster.toml").unlink()
        assert steps(tmp_path)[0] == "convoy doctor"
