"""`convoy session` as a person types it: a conversation that goes on elsewhere, under another split."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.served import convoy, convoy_json

FIRST = ("--prompt", "What is 36+37? Answer with just the number.")
THEN = ("--prompt", "And what is 20+5? Answer with just the number.")


@pytest.mark.slow
def test_a_conversation_goes_on_from_a_sealed_file_under_another_split(tmp_path: Path) -> None:
    file, key, other = str(tmp_path / "chat"), str(tmp_path / "key"), tmp_path / "other"
    first = convoy_json("session", "demo", *FIRST, "--members", "2", "--save", file, "--key", key)
    assert first["text"] == "73"
    assert (tmp_path / "chat").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    then = convoy_json("session", "demo", *THEN, "--members", "3", "--load", file, "--key", key)
    assert then["found_tokens"] == len(first["token_ids"]) // 16 * 16
    assert then["run_tokens"] <= len(then["token_ids"]) - then["found_tokens"]
    assert then["token_ids"][: len(first["token_ids"])] == first["token_ids"]
    alone = convoy_json("session", "demo", *THEN, "--load", file, "--key", key)
    assert alone["token_ids"] == then["token_ids"]
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    done = convoy("session", "demo", *THEN, "--load", file, "--key", str(other))
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
    arguments: list[str], error: str
) -> None:
    done = convoy("session", "demo", *arguments)
    assert done.returncode in {1, 2}
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert all(line.startswith(("error:", "hint:")) for line in lines), done.stderr
