"""Files with API keys: the forms that are read, the faults that errors name, and the writing of entries."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from convoy.api.keys import key_file
from convoy.api.keys.key_file import (
    append_entry,
    bare_text,
    check_private,
    digest_of,
    entry_text,
    new_key,
    parse_keys,
    read_client_key,
    read_key_file,
    write_new,
)
from convoy.api.keys.key_use import NO_LIMITS, KeyLimits
from convoy.errors import ConfigError

KEY = "convoy-0123456789abcdef"


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def read(path: Path) -> tuple[key_file.ApiKey, ...]:
    return parse_keys(read_key_file(path), path)


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", f"\n  {KEY}  \n\n"])
def test_one_line_is_one_bare_key(tmp_path: Path, text: str) -> None:
    (key,) = read(private(tmp_path / "api.key", text))
    assert (key.name, key.digest, key.is_named) == ("default", digest_of(KEY), False)
    assert KEY not in repr(key)


def test_tables_are_named_keys_with_limits(tmp_path: Path) -> None:
    text = f"""
[[keys]]
name = "ann"
key = "{KEY}"
expires = 2030-01-02
requests_per_minute = 60
tokens_per_minute = 1000
concurrent_requests = 2
total_tokens = 5000
[[keys]]
name = "bob"
key_sha256 = "{digest_of("another-key-of-bob").hex()}"
expires = 2030-01-02T01:00:00+01:00
metrics = true
"""
    ann, bob = read(private(tmp_path / "keys.toml", text))
    assert ann.limits == KeyLimits(60, 1000, 2, 5000)
    assert (ann.digest, bob.digest) == (digest_of(KEY), digest_of("another-key-of-bob"))
    assert ann.expires_s == bob.expires_s == 1893542400.0
    assert (ann.metrics, bob.metrics, bob.limits) == (False, True, NO_LIMITS)


def entry(text: str) -> str:
    return f'[[keys]]\nname = "ann"\nkey = "{KEY}"\n{text}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("fifteen-letters", "has 15 characters, expected at least 16"),
        ("k" * 257, "has 257 characters, expected at most 256"),
        ("two words in one line", "no HTTP header carries"),
        ("one line\nanother = ", "neither one key on one line nor TOML: an error at line 1"),
        ("keys = 3\n\na = 1", "other things than tables"),
        ("[other]\nname = 1", "other things than tables"),
        ('[[keys]]\nname = "ann"\n', "has neither key and key_sha256"),
        (entry(f'key_sha256 = "{"a" * 64}"'), "has both key and key_sha256"),
        ('[[keys]]\nname = "a b"\nkey = "x"', "name is 'a b', expected 1 to 64"),
        (f'[[keys]]\nkey = "{KEY}"', "name is missing"),
        (
            '[[keys]]\nname = "ann"\nkey = "short"',
            "number 1 (ann): key has 5 characters, expected at least 16",
        ),
        ('[[keys]]\nname = "ann"\nkey_sha256 = "12"', "key_sha256 is not valid"),
        (entry("expires = 2030-01-01T00:00:00"), "expected a date or a time with a zone"),
        (entry("expires = true"), "expected a date or a time with a zone"),
        (
            entry("requests_per_minute = 0"),
            "requests_per_minute is '0', expected a whole number of at least 1",
        ),
        (entry("total_tokens = true"), "total_tokens is 'True', expected a whole number"),
        (entry("metrics = 1"), "metrics is '1', expected true or false"),
        (entry("colour = 1"), "has no field colour"),
        (entry("") + entry(""), "two keys are named ann: [[keys]] number 1 and number 2"),
        (
            entry("") + entry("").replace("ann", "bob"),
            "one key stands there twice: [[keys]] number 1 and number 2",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_field(tmp_path: Path, text: str, said: str) -> None:
    path = private(tmp_path / "keys.toml", text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message
    assert KEY not in caught.value.message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o644, 0o610])
def test_a_file_that_others_can_read_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "api.key", KEY, mode)
    if path.stat().st_uid == 0:  # of root, readable by the process's group: a mounted secret
        os.chown(path, 0, max(os.getgroups(), default=0) + os.getegid() + 77)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}, expected 0600"):
        read_key_file(path)


def status(mode: int, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 1, 1, 1, uid, gid, 9, 0, 0, 0))


def test_a_mounted_secret_of_root_is_accepted_from_the_processs_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getgroups", lambda: [4321])
    path = Path("/mounted/api.key")
    for mode in (0o440, 0o640, 0o400):
        check_private(status(mode, 0, 4321), path, "the api key file")
    for wrong in (
        status(0o444, 0, 4321),
        status(0o440, 0, 4322),
        status(0o660, 0, 4321),
        status(0o440, 77, 4321),
    ):
        with pytest.raises(ConfigError, match="others could read it"):
            check_private(wrong, path, "the api key file")


def test_new_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    path, key = tmp_path / "api.key", new_key()
    write_new(path, bare_text(key))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_client_key(path) == key
    with pytest.raises(ConfigError, match="exists already"):
        write_new(path, bare_text(new_key()))
    with pytest.raises(ConfigError, match="holds one bare key"):
        append_entry(path, entry_text("ann", new_key(), None, NO_LIMITS, hashed=False))
    assert read_client_key(path) == key


def test_an_entry_is_added_whole_and_the_file_stays_private(tmp_path: Path) -> None:
    path, limits = tmp_path / "keys.toml", KeyLimits(requests_per_minute=3, total_tokens=9)
    write_new(path, entry_text("ann", KEY, "2030-01-02", limits, hashed=False))
    append_entry(path, entry_text("bob", "a-second-key-of-bob", None, NO_LIMITS, hashed=True))
    ann, bob = read(path)
    assert (ann.text, ann.limits, ann.expires_s) == (KEY, limits, 1893542400.0)
    assert (bob.text, bob.digest) == (None, digest_of("a-second-key-of-bob"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match=r"keys\.toml has a key named ann already"):
        append_entry(path, entry_text("ann", new_key(), None, NO_LIMITS, hashed=False))
    assert len(read(path)) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["keys.toml"]


def test_a_client_sends_the_one_key_of_a_file(tmp_path: Path) -> None:
    one = private(tmp_path / "one", entry(""))
    assert read_client_key(one) == KEY
    assert read_client_key(private(tmp_path / "foreign", "sesame\n")) == "sesame"
    several = private(
        tmp_path / "several", entry("") + '[[keys]]\nname = "bob"\nkey = "a-second-key-of-bob"\n'
    )
    with pytest.raises(ConfigError, match="holds 2 keys, expected one"):
        read_client_key(several)
    hashed = private(tmp_path / "hashed", f'[[keys]]\nname = "ann"\nkey_sha256 = "{"a" * 64}"\n')
    with pytest.raises(ConfigError, match="holds the hash of a key"):
        read_client_key(hashed)
