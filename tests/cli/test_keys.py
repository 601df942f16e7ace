"""``convoy keys``, and the flags by which servers and clients name keys and certificates."""

from __future__ import annotations

import json
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cli.test_client import FakeHead, head  # noqa: F401 - the fixture
from cli.test_serve import Shown
from cli.transcript import run_here
from convoy.cli.show.exit_codes import EXIT_CONFIG
from convoy.config.settings import Config
from convoy.config.table import ServeConfig
from convoy.errors import ConfigError, Unavailable
from convoy.sdk.options import serve_options
from support.fake_service import serving
from support.tls_files import make_tls_files


def test_a_new_file_is_private_and_shows_no_key(tmp_path: Path) -> None:
    done = run_here(["keys", "new", "api.key"], tmp_path)
    assert done.returncode == 0, done.stderr
    key = (tmp_path / "api.key").read_text().strip()
    assert len(key) > 40
    assert key not in done.stdout + done.stderr
    assert "api.key" in done.stdout
    assert stat.S_IMODE((tmp_path / "api.key").stat().st_mode) == 0o600
    again = run_here(["keys", "new", "api.key"], tmp_path)
    assert again.returncode == EXIT_CONFIG
    assert again.stderr.startswith("error: api.key exists already")


def test_named_keys_are_added_and_listed_without_their_secrets(tmp_path: Path) -> None:
    limits = ["--requests-per-minute", "60", "--total-tokens", "9", "--expires", "2030-12-31"]
    assert run_here(["keys", "new", "keys.toml", "--name", "ann", *limits], tmp_path).returncode == 0
    made = run_here(["keys", "new", "keys.toml", "--name", "bob", "--hash", "--show", "--json"], tmp_path)
    key = json.loads(made.stdout)["key"]
    text = (tmp_path / "keys.toml").read_text()
    assert key not in text
    assert 'name = "bob"' in text
    listed = json.loads(run_here(["keys", "list", "keys.toml", "--json"], tmp_path).stdout)
    assert [one["name"] for one in listed] == ["ann", "bob"]
    assert listed[0]["expires"] == "2030-12-31T00:00:00Z"
    assert (listed[0]["requests_per_minute"], listed[0]["total_tokens"]) == (60, 9)
    shown = run_here(["keys", "list", "keys.toml"], tmp_path).stdout
    assert "ann" in shown
    assert "convoy-" not in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--total-tokens", "5"], "error: a bare key has no limits and no expiry"),
        (["--name", "ann", "--hash"], "error: --hash needs --show"),
        (["--name", "ann", "--expires", "soon"], "error: --expires is 'soon', expected a date"),
        (["--name", "a b"], "error: keys.toml: [[keys]] number 1: name is 'a b'"),
    ],
)
def test_what_cannot_be_made_is_said(tmp_path: Path, flags: list[str], said: str) -> None:
    done = run_here(["keys", "new", "keys.toml", *flags], tmp_path)
    assert done.returncode != 0
    assert done.stderr.startswith(said)
    assert not (tmp_path / "keys.toml").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "192.0.2.1"], "error: refusing to listen on 192.0.2.1 without an api key"),
        (["--api-key-file", "open.key"], "error: the api key file open.key has mode 0644, expected 0600"),
        (
            ["--api-key-file", "short.key"],
            "error: the api key in short.key has 6 characters, expected at least 16",
        ),
        (["--tls-key", "tls.key"], "error: a TLS listener needs a certificate and its key"),
        (["--tls-certificate", "a", "--tls-key", "b"], "error: cannot read a: no such file"),
        (["--allowed-origin", "*"], "error: the origin '*' is not valid"),
    ],
)
@pytest.mark.parametrize("verb", ["serve", "run"])
def test_what_a_server_refuses_is_said_before_anything_starts(
    tmp_path: Path, verb: str, flags: list[str], said: str
) -> None:
    for name, mode in (("open.key", 0o644), ("short.key", 0o600)):
        (tmp_path / name).write_text(
            "sesame\n" if mode == 0o600 else "sesame-open-yourself\n", encoding="utf-8"
        )
        (tmp_path / name).chmod(mode)
    done = run_here([verb, "demo", "--port", "0", *flags], tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.startswith(said), done.stderr


def test_the_hint_of_a_refusal_names_flags_that_exist(tmp_path: Path) -> None:
    refused = run_here(["serve", "demo", "--host", "192.0.2.1"], tmp_path).stderr
    known = run_here(["serve", "--help"], tmp_path).stdout
    flags = {word.strip("`,;()") for word in refused.split() if word.startswith("--")}
    assert flags == {"--api-key-file", "--host"}
    assert all(flag in known for flag in flags)


def test_off_loopback_without_tls_one_line_warns(tmp_path: Path) -> None:
    assert run_here(["keys", "new", "api.key"], tmp_path).returncode == 0
    certificate, key = make_tls_files(tmp_path)
    flags = ["serve", "demo", "--host", "192.0.2.1", "--api-key-file", "api.key"]  # an address of no machine
    in_clear = run_here(flags, tmp_path)
    warnings = [line for line in in_clear.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: 192.0.2.1 has no TLS: keys and prompts cross the network in clear text "
        "(give --tls-certificate and --tls-key, or put a TLS proxy before it)"
    ]
    sealed = run_here([*flags, "--tls-certificate", certificate, "--tls-key", key], tmp_path)
    assert "warning: " not in sealed.stderr
    assert "error: cannot listen on 192.0.2.1" in sealed.stderr


def test_the_names_of_a_certificate_are_names_of_the_server(tmp_path: Path) -> None:
    certificate, key = map(Path, make_tls_files(tmp_path, "head.example"))
    serve = ServeConfig(tls_certificate=certificate, tls_key=key, allowed_hosts=("other.example",))
    assert serve_options(Config(serve=serve)).allowed_hosts == ("other.example", "head.example", "127.0.0.1")
    with pytest.raises(ConfigError, match="tls_key is missing"):
        serve_options(Config(serve=ServeConfig(tls_certificate=certificate)))


def test_a_server_with_keys_and_tls_serves_the_client_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, tls_key = make_tls_files(tmp_path)
    keys = tmp_path / "keys.toml"
    assert run_here(["keys", "new", str(keys), "--name", "ann"], tmp_path).returncode == 0
    files = ServeConfig(api_key_file=keys, tls_certificate=Path(certificate), tls_key=Path(tls_key))
    with serving(options=replace(serve_options(Config(serve=files)), port=0)) as running:
        url = running.url
        client = ["chat", "What is 2+3?", "--url", url, "--max-tokens", "4"]
        refused = run_here(client, tmp_path)
        assert refused.returncode == EXIT_CONFIG
        assert "is not trusted" in refused.stderr
        assert "--ca FILE" in refused.stderr
        locked_out = run_here([*client, "--ca", certificate], tmp_path)
        assert locked_out.stderr.startswith("error: no api key was sent")
        for given in (["--api-key-file", "keys.toml"], []):
            if not given:
                monkeypatch.setenv("CONVOY_API_KEY", keys.read_text().split('key = "')[1].split('"')[0])
            done = run_here([*client, "--ca", certificate, *given], tmp_path)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()


@pytest.mark.long
def test_the_verb_serves_with_keys_and_tls_and_reads_keys_again_at_a_hangup(tmp_path: Path) -> None:
    certificate, tls_key = make_tls_files(tmp_path)
    keys = tmp_path / "keys.toml"
    assert run_here(["keys", "new", str(keys), "--name", "ann"], tmp_path).returncode == 0
    flags = ("--api-key-file", str(keys), "--tls-certificate", certificate, "--tls-key", tls_key)
    shown = Shown("serve", "demo-mini", "--port", "0", "--dir", str(tmp_path / "home"), *flags)
    try:
        url = shown.wait_for(r"serving demo-mini at (https://\S+)/v1")[1]
        assert run_here(["keys", "new", str(keys), "--name", "bob", "--show"], tmp_path).returncode == 0
        ann, bob = (part.split('"')[0] for part in keys.read_text().split('key = "')[1:])
        assert ask(url, certificate, ann) == 200
        shown.process.send_signal(signal.SIGHUP)
        while ask(url, certificate, bob) != 200:
            pass
        assert shown.process.poll() is None
    finally:
        shown.process.send_signal(signal.SIGTERM)
        shown.process.wait(30)
    assert shown.process.returncode == 0


def ask(url: str, certificate: str, key: str) -> int:
    import ssl

    context = ssl.create_default_context(cafile=certificate)
    return httpx.get(f"{url}/v1/models", headers={"x-api-key": key}, verify=context, timeout=60.0).status_code


def test_clients_take_the_key_from_a_file_before_the_environment(
    head: FakeHead,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "api.key").touch(mode=0o600)
    (tmp_path / "api.key").write_text("of-the-file\n", encoding="utf-8")
    monkeypatch.setenv("CONVOY_API_KEY", "of-the-environment")
    for flags, wanted in ((["--api-key-file", "api.key"], "of-the-file"), ([], "of-the-environment")):
        done = run_here(["status", "--url", head.url, *flags], tmp_path)
        assert done.returncode == 0, done.stderr
        assert head.asked[-1][1]["Authorization"] == f"Bearer {wanted}"
    monkeypatch.setenv("CONVOY_API_KEY", "two words")
    done = run_here(["status", "--url", head.url], tmp_path)
    assert done.stderr.startswith(
        "error: the key in CONVOY_API_KEY has characters that no HTTP header carries"
    )
    assert "two words" not in done.stderr


def test_a_key_file_that_others_can_read_is_refused_to_a_client_too(tmp_path: Path) -> None:
    (tmp_path / "api.key").write_text("sesame\n", encoding="utf-8")
    os.chmod(tmp_path / "api.key", 0o604)
    done = run_here(["status", "--api-key-file", "api.key"], tmp_path)
    assert done.stderr.splitlines()[0] == (
        "error: the api key file api.key has mode 0604, expected 0600: others could read it"
    )


def test_run_reads_a_key_from_a_pipe_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise Unavailable("the cluster would start now")

    monkeypatch.setattr("convoy.cli.serve.start_cluster", started)
    reader, writer = os.pipe()
    os.write(writer, b"a-secret-key-in-a-pipe\n")
    os.close(writer)
    try:
        asked = ["run", "demo", "--members", "1", "--port", "0", "--api-key-file", f"/dev/fd/{reader}"]
        assert "the cluster would start now" in run_here(asked, tmp_path).stderr
    finally:
        os.close(reader)
