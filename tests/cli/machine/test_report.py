"""`convoy report`: secrets lie everywhere, and the file has none of them."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cli.transcript import run_here
from convoy.cli.machine.redaction import Redaction
from convoy.cli.running.process import announced
from convoy.cluster.checkup.finding import fail
from convoy.config.settings import load_config
from convoy.sdk.endpoint import Endpoint
from convoy.sdk.local_cluster import LocalCluster, LocalOptions

SECRETS = (
    *("tell me about my divorce", "divorce", "hunter2", "hf_AbCdEfGhIjKlMn", "sk-proj-AbC123xyz789AbC"),
    *("convoy1aaaaaadlamzt2asy5pnn4wijcr5jq", "192.0.2.77", "2001:db8::beef:1", "gpu-box.example.org"),
    *("ada@example.org", "/home/ada/keys/api.key", "deadbeefdeadbeefdeadbeef", "Bearer abcdefgh"),
)
# As they may come into a log, most of them against our rules.
LINES = (
    "user asked: tell me about my divorce",
    'error: cannot read /home/ada/keys/api.key: "tell me about my divorce"',
    "error: the key 'hunter2' is wrong",
    "09:12:03 lost: beta, at 192.0.2.77:7777 and [2001:db8::beef:1]:7777 of gpu-box.example.org",
    "hint: ask ada@example.org, or send Bearer abcdefgh to https://u:hunter2@gpu-box.example.org/x",
    "warning: hf_AbCdEfGhIjKlMn sk-proj-AbC123xyz789AbC convoy1aaaaaadlamzt2asy5pnn4wijcr5jq",
    "note: fingerprint deadbeefdeadbeefdeadbeef",
    "  /home/ada/venv/lib/python3.11/site-packages/convoy/engine/engine.py:12 in _run",
)
STATUS: dict[str, Any] = {
    **dict.fromkeys(("running", "waiting", "num_blocks", "free_blocks", "steps"), 4),
    **dict.fromkeys(("prompt_tokens", "generated_tokens", "generation"), 0),
    "route": "",
    "kernel": "",
    "ready": True,
    "ring_s": None,
    "stages": [],
}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the parts of the report of a member whose every part quotes secrets."""
    home = tmp_path / ".convoy"
    home.mkdir()
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("convoy.cli.machine.report.service_log_lines", lambda: list(LINES))
    found = [("peers", fail(line)) for line in LINES[1:]]
    monkeypatch.setattr("convoy.cli.doctor.findings_of", lambda _path: iter(found))
    status = STATUS | {"model": "/home/ada/keys/api.key", "reason": "beta is at 192.0.2.77"}
    status |= {"versions": {"beta": "0.1.0"}, "absent": [{"name": "beta"}]}
    monkeypatch.setattr(Endpoint, "get", lambda *_, **__: status)
    with LocalCluster(LocalOptions(num_members=2, engine={"max_batch": 7})) as local:
        config = home / "convoy.toml"
        shutil.copy(local.config_file("alpha"), config)
        config.write_text(config.read_text().replace("[serve]", '[serve]\napi_key_file = "hunter2"'))
        assert str(load_config(config).serve.api_key_file).endswith("hunter2")
        done = run_here(["report", "report.tar.gz"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "log.txt" in done.stdout
    assert "1 lines of logs were left out" in done.stdout
    assert (tmp_path / "report.tar.gz").stat().st_mode & 0o777 == 0o600
    return texts_in(tmp_path / "report.tar.gz")


def texts_in(report: Path) -> dict[str, str]:
    with tarfile.open(report) as archive:
        return {one.name: archive.extractfile(one).read().decode() for one in archive}  # type: ignore[union-attr]


def test_no_secret_that_lies_anywhere_is_in_the_report(texts: dict[str, str]) -> None:
    for secret in (*SECRETS, "alpha", "beta"):
        assert [name for name, text in texts.items() if secret in text] == [], secret


def test_names_of_a_head_that_has_no_folder_here_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("convoy.cli.doctor.findings_of", lambda _path: iter([]))
    status = STATUS | {"model": "merger", "cluster": "acme-7", "reason": "no step since gamma left"}
    status |= {"versions": {"gamma": "0.1.0"}, "absent": [{"name": "gamma"}]}
    monkeypatch.setattr(Endpoint, "get", lambda *_, **__: status)
    with announced("serve", "delta", tmp_path) as here:
        here.say("waits for delta")
        done = run_here(["report", "report.tar.gz"], tmp_path)
    assert done.returncode == 0, done.stderr
    text = "".join(texts_in(tmp_path / "report.tar.gz").values())
    assert "no step since member-1 left" in text
    for word in ("gamma", "delta", "merger", "acme-7"):
        assert word not in text


def test_the_report_has_what_helps(texts: dict[str, str]) -> None:
    log = texts["convoy-report/log.txt"]
    assert "  convoy/engine/engine.py:12 in _run\n" in log
    assert "lost: member-2, at (address)" in log
    config = json.loads(texts["convoy-report/config.json"])
    assert (config["serve api_key_file"], config["engine max_batch"]) == ("(set)", 7)
    status = json.loads(texts["convoy-report/status.json"])
    assert (status["num_blocks"], status["generated_tokens"], status["roster_expires_unix_s"]) == (4, 0, 0)
    assert "torch" in json.loads(texts["convoy-report/versions.json"])["versions"]


def test_figures_and_ciphers_stay_readable() -> None:
    hidden = Redaction({"alpha": "member-1"})
    assert hidden.text("alpha: ChaCha20-Poly1305 seals 0.2 GB/s, 11 GFLOP/s, 78.1 GB free") == (
        "member-1: ChaCha20-Poly1305 seals 0.2 GB/s, 11 GFLOP/s, 78.1 GB free"
    )
    assert hidden.text("cannot read /home/ada/GB/s") == "cannot read (path)"
