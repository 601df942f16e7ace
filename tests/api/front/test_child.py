"""A front process that cannot serve: it tells the engine's process why, wherever it was started."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from convoy.api.front.channel import FrontChannel
from convoy.api.front.setup import FrontSetup, encode_setup
from convoy.api.listen.options import ServeOptions
from convoy.cli.running.front import front_command
from convoy.wire.front import FrontFailed, Setup, decode_from_front

pytestmark = pytest.mark.outside

WITHOUT_CERTIFICATE = FrontSetup.of(ServeOptions(tls=("absent.pem", "absent.key")), None)


@pytest.mark.parametrize(
    ("setup", "kind", "message"),
    [
        (encode_setup(WITHOUT_CERTIFICATE), "ConfigError", "cannot read absent.pem: no such file"),
        (b"{", "Unavailable", "internal error: DecodeError"),
    ],
)
def test_any_reason_is_told_and_modules_of_the_working_directory_are_not_run(
    tmp_path: Path, setup: bytes, kind: str, message: str
) -> None:
    stranger = tmp_path / "convoy"
    stranger.mkdir()
    (stranger / "__init__.py").write_text("raise SystemExit('another program')")
    ours, theirs = socket.socketpair()
    channel = FrontChannel(ours)
    channel.send(Setup(setup))
    command = [*front_command("error", "text"), str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, cwd=tmp_path, pass_fds=(theirs.fileno(),))
    payload = channel.receive()
    process.wait(60)
    channel.close()
    assert payload is not None
    failed = decode_from_front(payload)
    assert isinstance(failed, FrontFailed)
    assert failed.error.kind == kind
    assert message in failed.error.message
