"""``convoy pull`` through a running head: its progress, its end, its failure and an interrupt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from cli.running.test_front import STATUS
from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.service import ServedModel, Service
from convoy.cli.main import run
from convoy.cli.running.process import announced
from convoy.cluster.status import ClusterStatus, PullStatus
from convoy.config.files import token_folder
from convoy.errors import PeerUnreachable, RequestError
from convoy.sdk.models import PULL_AGAIN
from support.fake_service import ByteTokenizer, FakeEngine, serving_of

NAME = "org/name"


class Puller:
    """Tell the states of a pull one after the other, and the last one again and again."""

    def __init__(self) -> None:
        self.states = [PullStatus(NAME, "pulling", {"alpha": (1, 2)})]
        self.done: list[str | None] = []
        self.refusal: RequestError | None = None

    def start(self, name: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.done.append(name)

    def stop(self) -> None:
        self.done.append(None)

    def status(self) -> ClusterStatus:
        state = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        return msgspec.structs.replace(STATUS, pull=state)


@pytest.fixture
def puller() -> Puller:
    return Puller()


@pytest.fixture
def url(puller: Puller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = ServedModel("demo", FakeEngine(), ByteTokenizer())
    service = Service((model,), lambda: (True, ""), puller.status, puller=puller)
    options = ServeOptions(port=0, page=PageOptions(tokens=token_folder()))
    with serving_of(service, options) as (found, _):
        yield found


def test_every_member_is_named_once_all_have_their_parts(
    url: str, puller: Puller, capsys: pytest.CaptureFixture[str]
) -> None:
    puller.states.append(PullStatus(NAME, "pulled", {"alpha": (2, 2), "beta": (1, 1)}))
    assert run(["pull", NAME, "--url", url]) == 0
    assert puller.done == [NAME]
    said = capsys.readouterr().err
    assert f"{NAME}: on alpha, beta" in said
    assert f"serve it: convoy serve {NAME}" in said


@pytest.mark.parametrize(("kind", "code"), [("", 1), ("ModelError", 78), ("HubUnreachable", 75)])
def test_a_pull_that_failed_ends_in_the_heads_words_with_the_code_of_its_error(
    kind: str, code: int, url: str, puller: Puller, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = PullStatus(NAME, "failed", error="beta: the disk is full", hint="make room", error_type=kind)
    puller.states = [failed]
    assert run(["pull", NAME, "--url", url]) == code
    said = capsys.readouterr().err
    assert f"error: {NAME} was not pulled: beta: the disk is full\nhint: make room" in said


def test_a_pull_that_the_page_stops_ends_with_the_reason(
    url: str, puller: Puller, capsys: pytest.CaptureFixture[str]
) -> None:
    puller.states.append(PullStatus(NAME, "stopping"))
    puller.states.append(PullStatus(NAME, "stopped", error="the pull was stopped"))
    assert run(["pull", NAME, "--url", url]) == 1
    assert f"error: {NAME} was not pulled: the pull was stopped" in capsys.readouterr().err


def test_an_interrupt_stops_the_head_too(
    url: str, puller: Puller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convoy.cli.model_files.pull.time.sleep", interrupt)
    assert run(["pull", NAME, "--url", url]) == 130
    assert puller.done == [NAME, None]
    assert f"the pull of {NAME} stops; `convoy pull {NAME}` goes on where it was" in capsys.readouterr().err


def test_an_interrupt_without_a_head_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("convoy.cli.model_files.pull.local_model", interrupt)
    assert run(["pull", NAME, "--cache", str(tmp_path)]) == 130
    assert f"the pull of {NAME} stops; `convoy pull {NAME}` goes on where it was" in capsys.readouterr().err


def test_a_head_that_ends_meanwhile_is_named_with_how_to_go_on(
    url: str, puller: Puller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(_endpoint: object) -> None:
        raise PeerUnreachable("no head answers")

    monkeypatch.setattr("convoy.cli.model_files.pull.cluster_status", end)
    assert run(["pull", NAME, "--url", url]) == 75
    said = capsys.readouterr().err
    assert f"the head ended while {NAME} was pulled" in said
    assert f"`convoy pull {NAME}` goes on where it was" in said


def test_a_second_pull_has_a_hint(url: str, puller: Puller, capsys: pytest.CaptureFixture[str]) -> None:
    puller.refusal = RequestError("another model is being pulled: org/other", code="pull_running")
    assert run(["pull", NAME, "--url", url]) == 1
    assert "another model is being pulled: org/other\nhint: wait until it is here" in capsys.readouterr().err


def test_several_models_are_served_by_one_command(
    url: str, puller: Puller, capsys: pytest.CaptureFixture[str]
) -> None:
    puller.states = [PullStatus(NAME, "pulled"), PullStatus("org/other", "pulled")]
    assert run(["pull", NAME, "org/other", "--url", url]) == 0
    assert f"serve them: convoy serve {NAME} --also org/other" in capsys.readouterr().err


def test_an_empty_name_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", ""]) == 2
    assert "error: '' is no model of a hub" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_asked_again_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text('[model]\nhub = "http://127.0.0.1:1"\ncache = "kept"\n')
    assert run(["pull", NAME, "--config", str(tmp_path / "c.toml")]) == 75
    assert f"hint: {PULL_AGAIN}" in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(["pull", NAME, "--cache", str(tmp_path / "file")]) == 78
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'file' / 'hub'} cannot be made: not a directory\nhint: " in said


def test_only_a_head_that_this_user_recorded_gets_a_token_unasked(
    url: str, puller: Puller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled_here: list[str] = []

    def pull_here(_settings: object, name: str, *, quiet: bool) -> str:
        pulled_here.append(name)
        return str(tmp_path)

    monkeypatch.setattr("convoy.cli.model_files.pull.local_model", pull_here)
    monkeypatch.setattr("convoy.cli.model_files.pull.DEFAULT_URL", url)
    puller.states = [PullStatus(NAME, "pulled")]
    assert run(["pull", NAME]) == 0
    assert (puller.done, pulled_here) == ([], [NAME])
    assert not token_folder().exists()
    with announced("serve", "alpha", tmp_path) as head:
        head.ready("serves demo", url)
        assert run(["pull", NAME]) == 0
    assert (puller.done, pulled_here) == ([NAME], [NAME])


def test_of_several_heads_one_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with announced("serve", "alpha", tmp_path) as one, announced("serve", "beta", tmp_path) as other:
        one.ready("serves demo", "http://127.0.0.1:1")
        other.ready("serves demo", "http://127.0.0.1:2")
        assert run(["pull", NAME]) == 2


@pytest.mark.parametrize("status", [200, 403])
def test_a_server_that_keeps_its_token_cannot_use_it_later(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Taker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200)

        def do_POST(self) -> None:
            self._answer(status if self.path == "/page/session" else 500)

        def _answer(self, found: int) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(found)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Taker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert run(["pull", NAME, "--url", f"http://127.0.0.1:{server.server_port}"]) == 1
        server.shutdown()
    assert not list(token_folder().iterdir())
