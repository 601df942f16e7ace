"""A peer's process ends when it is asked to, however often and whenever."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.cli import main
from convoy.config.settings import load_config
from convoy.sdk.head import only_process
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import load_member


@pytest.fixture
def config() -> Iterator[Path]:
    with LocalCluster(LocalOptions(num_members=2)) as local:
        yield local.config_file("beta")


class Told(io.StringIO):
    """Keep what a command says, and close ``writing`` once it has said ``last``."""

    def __init__(self, last: str, writing: int) -> None:
        super().__init__()
        self._last = last
        self._writing = writing

    def write(self, text: str) -> int:
        was_said = self._last in self.getvalue()
        size = super().write(text)
        if self._last in self.getvalue() and not was_said:
            os.close(self._writing)
        return size


@pytest.fixture
def same_signals() -> Iterator[None]:
    """Give SIGTERM and SIGINT their handlers back, which a command of this process replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("same_signals")
def test_the_end_of_standard_input_ends_it_where_asked(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    said = Told("standby: has no stage until another member is lost\n", writing)
    with os.fdopen(reading) as standard_input, contextlib.redirect_stderr(said):
        monkeypatch.setattr(sys, "stdin", standard_input)
        code = main.run(["join", "--config", str(config), "--until-stdin-closes", "--standby"])
    assert code == 0
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("starting: ")]
    assert lines[0].startswith("listening: beta listens on 127.0.0.1:")
    assert lines[1:] == [
        "standby: has no stage until another member is lost",
        "ended: beta, as standard input is over",
    ]


def test_a_second_process_with_the_keys_of_a_running_one_is_refused(config: Path) -> None:
    with only_process(load_config(config)):
        done = run_here(["join", "--config", str(config)], config.parent)
    assert done.returncode == 78
    keys = load_config(config).require_identity()
    assert done.stderr.splitlines()[-2:] == [
        f"error: beta runs already on this machine, with the keys in {keys}",
        "hint: stop that process first; another member of this machine needs keys of its own",
    ]


def test_a_port_in_use_is_one_line_with_the_address(config: Path) -> None:
    with socket.create_server(load_member(load_config(config)).member.address):
        done = run_here(["join", "--config", str(config)], config.parent)
    assert done.returncode == 75
    said, hint = done.stderr.splitlines()[-2:]
    assert re.fullmatch(r"error: port \d+ on 127\.0\.0\.1 is taken", said)
    assert "running already?" in hint
