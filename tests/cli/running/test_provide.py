"""``convoy serve --provide``: refusals before anything is loaded, and the certificates that it takes."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest

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


def test_a_certificate_is_for_providers_alone(tmp_path: Path) -> None:
    file = certificate(tmp_path, Identity.generate().public_key)
    with pytest.raises(UsageError, match="--certificate is for --provide"):
        Providing.of(None, None, file, Config(), tmp_path / "home")
