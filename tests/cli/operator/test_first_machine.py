"""Setting up a cluster says so, before and after: the folder may be the wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.cli.operator.first_machine import make_first_machine
from convoy.cli.operator.home import Home
from convoy.errors import RosterError


def made(directory: Path) -> None:
    make_first_machine(Home(directory), name="alpha", address="127.0.0.1", cluster="home")


def test_a_new_cluster_is_announced_and_named_with_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(Path(".convoy"))
    announced, other, unlocked, done = capsys.readouterr().err.splitlines()
    assert announced.startswith(f"no cluster in {tmp_path}/.convoy: making a new one")
    assert "for a cluster that exists" in other
    assert "--dir" in other
    assert "has no passphrase" in unlocked
    assert done.startswith("made cluster home with alpha as its head: ")
    assert done.endswith(f" are in {tmp_path}/.convoy")


def test_a_set_up_that_was_interrupted_goes_on_without_a_new_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path / ".convoy")
    made(home.directory)
    home.config.unlink()
    roster = home.roster.read_bytes()
    capsys.readouterr()
    made(home.directory)
    assert "no cluster in" not in capsys.readouterr().err
    assert home.roster.read_bytes() == roster


def test_a_name_that_no_member_can_have_is_refused_before_a_key_is_made(tmp_path: Path) -> None:
    home = Home(tmp_path / ".convoy")
    with pytest.raises(RosterError, match="'my pc' cannot name a member") as caught:
        make_first_machine(home, name="my pc", address="127.0.0.1", cluster="home")
    assert caught.value.hint == "choose another name with --name"
    assert not home.directory.exists()
