"""Addresses and names that an invitation starts from, and the folder that it fills."""

from __future__ import annotations

import ipaddress
import re
import socket
import stat
from pathlib import Path

import pytest

from convoy.cli.operator.home import Home, config_file, host_name, local_addresses, parse_place, roster_file
from convoy.errors import ConfigError, IdentityError, UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("192.0.2.1", ("192.0.2.1", 5)),
        ("192.0.2.1:8000", ("192.0.2.1", 8000)),
        ("alpha.example", ("alpha.example", 5)),
        ("alpha.example:1", ("alpha.example", 1)),
        ("2001:db8::1", ("2001:db8::1", 5)),
        ("[2001:db8::1]", ("2001:db8::1", 5)),
        ("[2001:db8::1]:9", ("2001:db8::1", 9)),
    ],
)
def test_a_place_is_a_host_with_or_without_a_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_place(text, 5) == expected


@pytest.mark.parametrize("text", ["alpha:", ":7777", "alpha:99999", "[::1", "[]:7", "alpha:x"])
def test_what_is_no_place_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--address"):
        parse_place(text, None)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("alpha", "alpha"),
        ("Mac-Studio.local", "Mac-Studio"),
        ("büro", "b-ro"),
        ("_x_", "x"),
        ("", "member"),
        ("é", "member"),
        ("a" * 80, "a" * 63),
    ],
)
def test_a_host_name_becomes_a_members_name(monkeypatch: pytest.MonkeyPatch, host: str, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert host_name() == name
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name)


def test_local_addresses_are_such_as_others_can_use() -> None:
    found = local_addresses()
    assert found
    for host in found:
        address = ipaddress.ip_address(host)
        assert not address.is_link_local
        assert not address.is_loopback or found == ["127.0.0.1"]


def test_what_is_in_the_folder_is_used_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "convoy")
    assert home.settings() is None
    operator, identity = home.open_operator(), home.open_identity()
    assert home.open_operator().public_key == operator.public_key
    assert home.open_identity().public_key == identity.public_key
    assert stat.S_IMODE(home.directory.stat().st_mode) == 0o700
    home.write_config("alpha", operator.public_key, listen_host="::")
    settings = home.settings()
    assert settings is not None
    assert settings.require_name() == "alpha"
    assert settings.require_operator_key() == operator.public_key
    assert settings.require_identity() == home.identity
    assert settings.listen.host == "::"


def test_what_a_verb_is_not_told_it_takes_from_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = Path("other.toml")
    assert config_file(None) is None
    assert roster_file(None) == Path("roster.toml")
    home = Home(Path(".convoy"))
    home.directory.mkdir()
    home.config.touch()
    home.roster.touch()
    assert (config_file(None), config_file(named)) == (home.config, named)
    assert (roster_file(None), roster_file(named)) == (home.roster, named)
    assert config_file(None, Path("elsewhere")) is None
    Path("roster.toml").touch()
    assert roster_file(None) == Path("roster.toml")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, IdentityError), match="cannot make"):
        Home(tmp_path / "file" / "convoy").open_operator()
