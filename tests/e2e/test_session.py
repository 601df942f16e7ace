"""`convoy session` as a person types it: a conversation that goes on elsewhere, under another split."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.transcript import run_here
from convoy.cli.main import run
from e2e.served import convoy

FIRST = ("--prompt", "What is 36+37? Answer with just the number.")
THEN = ("--prompt", "And what is 20+5? Answer with just the number.")

Say = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move to a folder without a clone's own .convoy, which a session would take."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def session(capsys: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """Give session(...): the output of `convoy session demo-mini ... --json`, typed in this process."""
    threads = torch.get_num_threads()

    def say(*arguments: str) -> dict[str, Any]:
        code = run(["session", "demo-mini", *arguments, "--json"])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        answer: dict[str, Any] = json.loads(shown.out)
        return answer

    yield say
    torch.set_num_threads(threads)


@pytest.mark.long
def test_a_conversation_goes_on_from_a_sealed_file_under_another_split(session: Say, tmp_path: Path) -> None:
    file, key, other = str(tmp_path / "chat"), str(tmp_path / "key"), tmp_path / "other"
    first = session(*FIRST, "--members", "2", "--save", file, "--key", key)
    assert first["text"] == "73"
    assert (tmp_path / "chat").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    then = session(*THEN, "--load", file, "--key", key)
    assert then["found_tokens"] == len(first["token_ids"]) // 16 * 16
    assert then["run_tokens"] <= len(then["token_ids"]) - then["found_tokens"]
    assert then["token_ids"][: len(first["token_ids"])] == first["token_ids"]
    assert then["text"] == "25"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    done = convoy("session", "demo-mini", *THEN, "--load", file, "--key", str(other))
    assert done.returncode == 1
    assert "does not open" in done.stderr
    assert "hint: is this the key file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "there is nothing to do"),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens is 0"),
        (["--load", "nowhere"], "cannot read nowhere"),
        (["--load", "."], "is not a file"),
        (["--prompt", "x", "--save", "nowhere/chat"], "there is no directory nowhere"),
        (["--load", "nowhere", "--key", "nowhere"], "the session's key: cannot read nowhere"),
    ],
)
def test_what_is_wrong_with_the_files_is_said_before_anything_starts(
    tmp_path: Path, arguments: list[str], error: str
) -> None:
    done = run_here(["session", "demo", *arguments], tmp_path)
    assert done.returncode in {1, 2, 78}
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert all(line.startswith(("error:", "hint:")) for line in lines), done.stderr
