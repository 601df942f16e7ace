"""``convoy pull`` through a running head: its progress, its end, its failure and an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cli.running.test_front import STATUS
from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.service import ServedModel, Service
from convoy.cli.main import run
from convoy.cluster.status import ClusterStatus, PullStatus
from convoy.config.files import token_folder
from support.fake_service import ByteTokenizer, FakeEngine, serving_of

NAME = "org/name"


class Puller:
    """Tell the states of a pull one after the other, and the last one again and again."""

    def __init__(self) -> None:
        self.states = [PullStatus(NAME, "pulling", {"alpha": (1, 2)})]
        self.done: list[str | None] = []

    def start(self, name: str) -> None:
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


def test_a_pull_that_failed_ends_in_the_heads_words(
    url: str, puller: Puller, capsys: pytest.CaptureFixture[str]
) -> None:
    puller.states = [PullStatus(NAME, "failed", error="beta: the disk is full", hint="make room")]
    assert run(["pull", NAME, "--url", url]) == 1
    said = capsys.readouterr().err
    assert f"error: {NAME} was not pulled: beta: the disk is full\nhint: make room" in said


def test_an_interrupt_stops_the_head_too(
    url: str, puller: Puller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convoy.cli.model_files.pull.time.sleep", interrupt)
    assert run(["pull", NAME, "--url", url]) == 130
    assert puller.done == [NAME, None]
    assert f"`convoy pull {NAME}` goes on where it was" in capsys.readouterr().err
