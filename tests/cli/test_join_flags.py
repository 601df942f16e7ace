"""`convoy join` without an invitation: which flags count, and its output at the start."""

from __future__ import annotations

import itertools
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.cli.show.exit_codes import EXIT_CONFIG
from convoy.config.settings import load_config
from convoy.crypto.identity import OperatorKey
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import load_member
from convoy.transport.ports import free_port
from convoy.trust.roster.roster import sign_roster
from support.scraping import scrape


@pytest.fixture
def config() -> Iterator[Path]:
    with LocalCluster(LocalOptions(num_members=2)) as local:
        yield local.config_file("beta")


@pytest.fixture
def port() -> str:
    return str(free_port())


@contextmanager
def joining(config: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "convoy", "join", "--config", str(config), "--until-stdin-closes", *flags],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(process: subprocess.Popen[str], up_to: str) -> list[str]:
    """Return its lines up to one of that kind, without those about its start."""
    assert process.stderr is not None
    said: list[str] = []
    while not said or not said[-1].startswith(up_to):
        line = process.stderr.readline()
        assert line, said
        if not line.startswith("starting: "):
            said.append(line.rstrip("\n"))
    return said


def test_a_peer_listens_while_it_says_that_it_loads_pytorch(config: Path, port: str) -> None:
    with joining(config, "--port", port) as process:
        assert process.stderr is not None
        # The first line is a note on the port.
        assert "starting: loading PyTorch ...\n" in itertools.islice(process.stderr, 2)
        with socket.create_connection(("127.0.0.1", int(port)), timeout=30):
            pass


@pytest.mark.long
def test_a_port_and_metrics_that_were_asked_for_are_said_and_listen_until_several_signals_end_it(
    config: Path, port: str
) -> None:
    listed, metrics = load_member(load_config(config)).member.address[1], free_port()
    with joining(config, "--port", port, "--metrics", f"127.0.0.1:{metrics}") as process:
        said = lines(process, "listening")
        said.remove(f"metrics: http://127.0.0.1:{metrics}/metrics")
        assert said == [
            f"note: beta listens on port {port}, and the roster sends the others to 127.0.0.1:{listed}: it "
            f"must lead here",
            f"listening: beta listens on 127.0.0.1:{port}",
        ]
        with socket.create_connection(("127.0.0.1", int(port)), timeout=30):
            pass
        found = scrape(f"http://127.0.0.1:{metrics}/metrics")
        assert (found("convoy_head_up"), found("convoy_stage_layers")) == (0, 0)
        assert found("convoy_build_info", part="peer") == 1
        for _ in range(5):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        # The refusal of the connection above may come before or behind it.
        assert "ended: beta, as a signal asked" in process.stderr.read().splitlines()
        assert process.wait(30) == 0
    with socket.create_server(("127.0.0.1", metrics)):
        pass


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--name", "gamma"], "error: --name is gamma, and {config} is beta's\nhint: leave --name out\n"),
        (["--address", "192.0.2.1"], "error: --address is 192.0.2.1, and the roster sends the others to 127"),
    ],
)
def test_what_only_an_invitation_can_use_is_refused_with_both_values(
    config: Path, flags: list[str], error: str
) -> None:
    done = run_here(["join", "--config", str(config), *flags], config.parent)
    assert done.returncode == 2
    assert done.stderr.startswith(error.format(config=config))


def test_the_only_head_is_told_to_serve(config: Path) -> None:
    head = config.parent / config.name.replace("beta", "alpha")
    done = run_here(["join", "--config", str(head)], config.parent)
    assert done.returncode == 2
    assert done.stderr == "error: alpha is the head of this cluster\nhint: `convoy serve MODEL` starts it\n"


def test_an_address_for_metrics_that_is_none_is_said_before_anything_starts(config: Path) -> None:
    done = run_here(["join", "--config", str(config), "--metrics", "here"], config.parent)
    assert done.returncode == 2
    assert done.stderr == "error: --metrics is 'here', expected HOST:PORT\nhint: --metrics 127.0.0.1:9464\n"


def test_a_model_that_is_not_there_ends_it_at_once(config: Path, tmp_path: Path) -> None:
    flags = ["--config", str(config), "--model", str(tmp_path / "nowhere")]
    done = run_here(["join", *flags], tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert f"error: no model at {tmp_path}/nowhere\n" in done.stderr
    assert "listening" not in done.stderr


@pytest.mark.long
def test_an_older_roster_file_at_the_start_is_one_calm_line_and_a_standby_by_its_file_says_so(
    config: Path,
) -> None:
    config.write_text(config.read_text().replace("[cluster]", "[cluster]\nstandby = true"))
    settings = load_config(config)
    me = load_member(settings)
    key = OperatorKey.generate()  # the one that signed this cluster's roster is gone
    file = settings.require_roster()
    shutil.rmtree(settings.require_identity() / "accepted")
    config.write_text(config.read_text().replace(settings.require_operator_key().hex(), key.public_key.hex()))
    older, newer, newest = (sign_roster(replace(me.roster, epoch=epoch), key) for epoch in (2, 4, 5))
    file.write_bytes(newer)
    load_member(load_config(config))
    file.write_bytes(older)
    with joining(config) as process:
        assert lines(process, "listening")[:-1] == [
            "note: roster epoch 4 counts, which came later than epoch 2 of the file"
        ]
        assert lines(process, "standby")[-1] == "standby: has no stage until another member is lost"
        other = file.with_suffix(".new")
        other.write_bytes(newest)
        other.replace(file)
        assert lines(process, "roster: epoch 5") == ["roster: epoch 5 counts now"]
