"""``convoy proxy`` and ``convoy identity certify`` as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from cli.transcript import run_here
from convoy.cli.operator.certify import read_certificate_file
from convoy.cli.proxy import read_keys, read_proxy_file
from convoy.errors import ConfigError, UsageError
from convoy.wire.fleet.certified import read_certificate

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
KEY = bytes(range(32))


def test_a_proxy_starts_from_its_file_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text("sk-test\n")
    (tmp_path / "proxy.toml").write_text(
        f'coordinator = "http://127.0.0.1:1"\napi_key_file = "key"\ntrust_providers = ["{KEY.hex()}"]\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "convoy", "proxy", "--config", "proxy.toml", "--port", "0", "--json"],
        env=ENVIRONMENT,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    try:
        assert (ready["event"], ready["trusts"]) == ("ready", 1)
        body = {"model": "m", "messages": []}
        answer = httpx.post(f"{ready['url']}/v1/chat/completions", json=body, trust_env=False)
        assert answer.status_code == 503
        assert "cannot be reached" in answer.json()["error"]["message"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "a coordinator and --api-key-file are needed"),
        (["http://127.0.0.1:1", "--api-key-file", "key"], "trusts no key"),
        (["http://example.com", "--api-key-file", "key", "--trust-provider", KEY.hex()], "without TLS"),
        (["http://127.0.0.1:1", "--api-key-file", "key", "--trust-operator", "ab"], "is no key"),
    ],
)
def test_a_proxy_that_could_not_serve_says_why(tmp_path: Path, arguments: list[str], reason: str) -> None:
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text("sk-test\n")
    done = run_here(["proxy", *arguments], tmp_path)
    assert done.returncode in {2, 78}
    assert reason in done.stderr


def test_what_is_wrong_with_a_proxys_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "proxy.toml"
    for text in ("coordinater = 1", "trust_providers = 1", "x"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"proxy\.toml"):
            read_proxy_file(file)
    with pytest.raises(UsageError, match="is no key"):
        read_keys("--trust-provider", ["zz"])


def test_an_operator_certifies_a_provider(tmp_path: Path) -> None:
    done = run_here(["identity", "certify", KEY.hex(), "three", "--dir", "home", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    data = read_certificate_file(tmp_path / "provider.certificate", KEY)
    found = read_certificate(data, time.time())
    assert (found.name, found.operator.hex()) == ("three", json.loads(done.stdout)["operator_key"])
    with pytest.raises(ConfigError, match="of another provider"):
        read_certificate_file(tmp_path / "provider.certificate", bytes(32))
    with pytest.raises(ConfigError, match="is no certificate"):
        read_certificate_file(tmp_path / "absent", KEY)
