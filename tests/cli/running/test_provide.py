"""``convoy serve --provide``: refusals before anything is loaded, and the certificates that it takes."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.cli.operator.home import Home
from convoy.cli.running.provide import Providing
from convoy.config.settings import Config
from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import ConfigError, UsageError
from convoy.wire.fleet.certified import certify

URL = "ws://127.0.0.1:8780"


def certificate(folder: Path, identity: bytes) -> Path:
    file = folder / "provider.certificate"
    made = certify(OperatorKey.generate(), identity, "alpha", int(time.time()) + 60)
    file.write_bytes(base64.b64encode(made))
    return file


def test_a_head_that_provides_takes_its_own_certificate(tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = certificate(tmp_path, Home(home).open_identity().public_key)
    providing = Providing.of(URL, None, file, Config(), home)
    assert providing is not None
    assert providing.certificate == base64.b64decode(file.read_bytes())


def test_a_certificate_of_another_provider_is_refused(tmp_path: Path) -> None:
    file = certificate(tmp_path, Identity.generate().public_key)
    with pytest.raises(ConfigError, match="certificate of another provider"):
        Providing.of(URL, None, file, Config(), tmp_path / "home")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([URL, "--coordinator-key", "ab"], "--coordinator-key is no key"),
        ([URL, "--upstream", "ann:secret@127.0.0.1:80"], "upstream '127.0.0.1:80' is no URL of HTTP"),
        ([URL, "--upstream-key-file", "nothing"], "nothing"),
        ([URL, "--certificate", "nothing"], "nothing is no certificate"),
        ([URL, "--traces", "127.0.0.1"], "127.0.0.1"),
        (["http://127.0.0.1:8780"], "is no URL of a WebSocket"),
    ],
)
def test_a_wrong_flag_is_told_before_a_key_is_made(tmp_path: Path, words: list[str], told: str) -> None:
    done = run_here(["provide", *words], tmp_path)
    assert done.returncode in {2, 78}
    assert told in done.stderr.splitlines()[0]
    assert not (tmp_path / ".convoy").exists()
    assert done.stdout == ""


def test_a_folder_without_a_key_gets_none_for_the_certificate_of_another(tmp_path: Path) -> None:
    other = Identity.generate().public_key
    certificate(tmp_path, other)
    done = run_here(["provide", URL, "--certificate", "provider.certificate"], tmp_path)
    assert done.returncode == 78
    assert done.stderr.splitlines()[0] == (
        f"error: provider.certificate is the certificate of another provider, with key {other.hex()}; "
        "this one has no key yet"
    )
    assert not (tmp_path / ".convoy").exists()


def test_a_certificate_is_for_providers_alone(tmp_path: Path) -> None:
    file = certificate(tmp_path, Identity.generate().public_key)
    with pytest.raises(UsageError, match="--certificate is for --provide"):
        Providing.of(None, None, file, Config(), tmp_path / "home")
