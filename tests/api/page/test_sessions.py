"""Tokens of ``convoy open`` and the sessions that they begin: once, in time, and for one head."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from convoy.api.page.sessions import SESSION_LIFE_S, Sessions
from convoy.api.page.tokens import TOKEN_LIFE_S, OpenTokens
from convoy.errors import ConfigError


class Clock:
    """Tell a time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_token_works_once_and_for_its_head_alone(tmp_path: Path) -> None:
    tokens = OpenTokens(tmp_path / "open")
    token = tokens.make(8000, "operate")
    assert tokens.use(token, 8001) is None
    assert tokens.use("v" + token[1:], 8000) is None
    assert tokens.use(token, 8000) == "operate"
    assert tokens.use(token, 8000) is None
    assert tokens.use(tokens.make(8000, "view"), 8000) == "view"


def test_a_token_is_too_old_after_five_minutes(tmp_path: Path) -> None:
    clock = Clock()
    tokens = OpenTokens(tmp_path / "open", clock)
    late, good = tokens.make(8000, "operate"), tokens.make(8000, "operate")
    clock.now_s += TOKEN_LIFE_S - 1
    assert tokens.use(good, 8000) == "operate"
    clock.now_s += 1
    assert tokens.use(late, 8000) is None


def test_the_token_itself_is_not_on_disk_and_old_ones_are_removed(tmp_path: Path) -> None:
    clock = Clock()
    tokens = OpenTokens(tmp_path / "open", clock)
    token = tokens.make(8000, "operate")
    (name,) = os.listdir(tokens.folder)
    assert token not in name
    assert (tokens.folder / name).stat().st_mode & 0o777 == 0o600
    assert (tokens.folder / name).read_bytes() == b""
    clock.now_s += TOKEN_LIFE_S
    tokens.make(8000, "operate")
    assert name not in os.listdir(tokens.folder)


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    tokens = OpenTokens(folder)
    token = tokens.make(8000, "operate")
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="0777"):
        tokens.use(token, 8000)
    with pytest.raises(ConfigError, match="expected 0700"):
        tokens.make(8000, "operate")


def test_a_link_in_place_of_a_token_is_no_token(tmp_path: Path) -> None:
    tokens = OpenTokens(tmp_path / "open")
    token = tokens.make(8000, "operate")
    (path,) = tokens.folder.iterdir()
    path.unlink()
    path.symlink_to(tmp_path)
    assert tokens.use(token, 8000) is None


@pytest.mark.parametrize(
    "token", ["", "o", "o" + "A" * 42, "x" + "A" * 43, "o../../../../../etc/passwd", "o" + "é" * 43]
)
def test_text_that_is_no_token_is_not_looked_up(tmp_path: Path, token: str) -> None:
    # The folder is missing: a look at it would raise.
    assert OpenTokens(tmp_path / "missing").use(token, 8000) is None


def test_a_session_ends_by_its_time_by_itself_and_with_all() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    old = sessions.begin("operate")
    clock.now_s += SESSION_LIFE_S - 1
    new = sessions.begin("view")
    assert sessions.find(old) is not None
    clock.now_s += 1
    assert sessions.find(old) is None
    found = sessions.find(new)
    assert found is not None
    assert found.scope == "view"
    sessions.end(new)
    assert sessions.find(new) is None
    both = [sessions.begin("view"), sessions.begin("operate")]
    assert sessions.end_all() == 2
    assert not any(sessions.find(secret) for secret in both)
    assert sessions.find("") is None


def test_the_oldest_session_gives_way_beyond_the_most() -> None:
    sessions = Sessions(max_sessions=2)
    first, second, third = (sessions.begin("view") for _ in range(3))
    assert sessions.find(first) is None
    assert sessions.find(second) is not None
    assert sessions.find(third) is not None
