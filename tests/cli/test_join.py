"""A peer's process ends when it is asked to, however often and whenever."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.config.settings import load_config
from convoy.sdk.head import only_process
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import load_member


@pytest.fixture
def config() -> Iterator[Path]:
    with LocalCluster(LocalOptions(num_members=2)) as local:
        yield local.config_file("beta")


def start(config: Path, *flags: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "convoy", "join", "--config", str(config), *flags],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "starting: loading PyTorch ...\n"
    assert process.stderr.readline().startswith("listening: beta listens on 127.0.0.1:")
    return process


def test_the_end_of_standard_input_ends_it_where_asked(config: Path) -> None:
    process = start(config, "--until-stdin-closes", "--standby")
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.close()
    assert process.stderr.read().splitlines() == [
        "standby: has no stage until another member is lost",
        "ended: beta, as standard input is over",
    ]
    assert process.wait(30) == 0


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
