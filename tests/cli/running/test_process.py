"""A process announces itself to systemd and to `convoy ps`."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from convoy.cli.running.process import ProcessRecord, announced, keep_awake, running_processes
from support.notified import notify_socket


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_learns_when_a_process_is_ready_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with notify_socket(abstract=abstract) as socket:
        monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
        with announced("serve", "alpha", tmp_path) as here:
            # Its children must not speak in its place.
            assert "NOTIFY_SOCKET" not in os.environ
            here.ready("serves demo")
            socket.until("READY=1")
        assert "STATUS=serves demo" in socket.until("STOPPING=1")


def test_a_member_that_is_quoted_sends_systemd_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with notify_socket() as socket:
        monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
        with announced("join", "beta", tmp_path) as here:
            here.say("ended: alpha said\nMAINPID=1\x1b[2J" + "x" * 1000)
            (found,) = running_processes()
        assert not [line for line in socket.until("STOPPING=1") if line.startswith("MAINPID")]
    assert found.state.startswith("ended: alpha said MAINPID=1 [2Jx")
    assert len(found.state) == 500


def test_a_process_is_listed_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert running_processes() == []
    with announced("serve", "alpha", tmp_path) as here, announced("join", "x", tmp_path, listed=False):
        here.ready("serves demo", "http://127.0.0.1:1")
        (found,) = running_processes()
        assert (found.pid, found.verb, found.name, found.url) == (
            os.getpid(),
            "serve",
            "alpha",
            "http://127.0.0.1:1",
        )
    assert running_processes() == []


@pytest.mark.parametrize("since_start_s", [1, -1000])
def test_another_process_with_the_id_of_a_dead_one_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since_start_s: float
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # A file system without locks: there is no file that says whether the owner is dead.
    folder = tmp_path / "convoy/running/convoy-x"
    folder.mkdir(parents=True)
    began = psutil.Process().create_time() + since_start_s
    record = ProcessRecord(os.getpid(), "serve", "alpha", "/", platform.node(), began)
    (folder / "process.json").write_text(json.dumps(asdict(record)))
    assert [one.pid for one in running_processes()] == ([os.getpid()] if since_start_s > 0 else [])


def test_a_cache_that_cannot_be_written_ends_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with announced("serve", "alpha", tmp_path) as here:
        here.ready("serves demo")
        assert running_processes() == []


def test_a_manager_that_has_gone_ends_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nothing"))
    with announced("serve", "alpha", tmp_path) as here:
        here.ready("serves demo")


def test_a_mac_stays_awake_as_long_as_the_process_runs() -> None:
    started: list[list[str]] = []
    keep_awake(4711, "darwin", lambda command: started.append(list(command)))
    assert started == [["/usr/bin/caffeinate", "-i", "-w", "4711"]]


def test_other_systems_start_nothing_and_a_mac_without_the_command_goes_on() -> None:
    keep_awake(4711, "linux", lambda _command: pytest.fail("nothing is needed"))

    def missing(_command: object) -> None:
        raise FileNotFoundError

    keep_awake(4711, "darwin", missing)
