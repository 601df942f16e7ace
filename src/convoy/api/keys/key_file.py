"""Read and write files with API keys: one bare key on one line, or TOML with a ``[[keys]]`` table per named
key.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from convoy.api.keys.key_use import NO_LIMITS, KeyLimits
from convoy.config.files import FOLDER_HINT
from convoy.errors import ConfigError

_KEYS_HINT = "docs/api.md has the keys of this file, and `convoy keys new` writes them"

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 256
MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 4096
BARE = "default"
HINT_NEW = "`convoy keys new FILE` makes a file with a new key"
_HINT_CLIENT = "make it with the key on its first line, readable for you alone (chmod 600)"
LIMIT_NAMES = tuple(one.name for one in fields(KeyLimits))
_PREFIX = "convoy-"
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_FIELDS = ("name", "key", "key_sha256", "expires", "metrics", *LIMIT_NAMES)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Hold one key. A key with ``metrics`` may read every key's counts; ``is_named`` marks one from a TOML
    file.
    """

    name: str
    digest: bytes
    expires_s: float | None = None
    metrics: bool = False
    limits: KeyLimits = NO_LIMITS
    is_named: bool = True
    text: str | None = field(default=None, repr=False)


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 by which a key is looked up."""
    return hashlib.sha256(key.encode()).digest()


def is_sendable(key: str) -> bool:
    """Return whether an HTTP header can carry ``key``."""
    return bool(key) and key.isascii() and key.isprintable() and " " not in key


def check_key(key: str, what: str) -> str:
    """Return ``key``. Raises `ConfigError`, naming ``what``, for one that is too short or not sendable."""
    if not is_sendable(key):
        raise ConfigError(
            f"{what} is empty or has characters that no HTTP header carries",
            hint=f"use printable ASCII without spaces; {HINT_NEW}",
        )
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        bound = f"at least {MIN_KEY_CHARS}" if len(key) < MIN_KEY_CHARS else f"at most {MAX_KEY_CHARS}"
        raise ConfigError(f"{what} has {len(key)} characters, expected {bound}", hint=HINT_NEW)
    return key


def read_key_file(path: Path, hint: str = HINT_NEW) -> bytes:
    """Return a file with keys. Raises `ConfigError` if it is missing, too long or others can read it."""
    try:
        with path.open("rb") as file:
            check_private(os.fstat(file.fileno()), path, "the api key file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        if isinstance(error, IsADirectoryError):
            hint = f"{path} is a folder: name the file in it"
        raise ConfigError(f"cannot read the api key file {path}: {reason}", hint=hint) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the api key file {path} is longer than {MAX_FILE_BYTES} bytes",
            hint="remove keys that are no longer used",
        )
    return data


def check_private(status: os.stat_result, path: Path, what: str) -> None:
    """Raise `ConfigError` if others can read an open file. A mounted secret may have the process's group."""
    mode = stat.S_IMODE(status.st_mode)
    mounted = status.st_uid == 0 and status.st_gid in {os.getegid(), *os.getgroups()} and not mode & 0o027
    if mode & 0o077 and not mounted:
        raise ConfigError(
            f"{what} {path} has mode {mode:04o}, expected 0600: others could read it",
            hint=f"chmod 600 {path}; for a file of root, 0640 with this process's group is accepted too",
        )


def read_client_key(path: Path) -> str:
    """Return the one key that a client sends. Raises `ConfigError` if the file holds none, or several."""
    data = read_key_file(path, _HINT_CLIENT)
    text = _text(data, path)
    if _bare(text) is not None:
        return _checked_client_key(_bare(text) or "", path)
    keys = [key.text for key in parse_keys(data, path)]
    if len(keys) != 1 or keys[0] is None:
        what = f"{len(keys)} keys" if len(keys) != 1 else "the hash of a key"
        raise ConfigError(
            f"the api key file {path} holds {what}, expected one key", hint="put the key alone into a file"
        )
    return keys[0]


def _checked_client_key(key: str, path: Path) -> str:
    # A key of another server may be shorter than ours, so its length is not checked.
    if not key:
        raise ConfigError(
            f"the api key file {path} is empty, expected the key on its first line", hint=_HINT_CLIENT
        )
    if not is_sendable(key):
        raise ConfigError(
            f"the key in {path} has characters that no HTTP header carries",
            hint="`convoy keys new FILE` makes a key that fits",
        )
    return key


def parse_keys(data: bytes, path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file. Raises `ConfigError`, naming the file, the key and the field."""
    text = _text(data, path)
    bare = _bare(text)
    if bare is not None:
        check_key(bare, f"the api key in {path}")
        return (ApiKey(BARE, digest_of(bare), is_named=False, text=bare),)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is neither one key on one line nor TOML: {_place(error)}", hint=HINT_NEW
        ) from None
    listed = tables.pop("keys", None)
    if (
        tables
        or not isinstance(listed, list)
        or not listed
        or not all(isinstance(one, dict) for one in listed)
    ):
        raise ConfigError(f"{path} is TOML, and has other things than tables [[keys]]", hint=HINT_NEW)
    if len(listed) > MAX_KEYS:
        raise ConfigError(f"{path} has {len(listed)} keys, expected at most {MAX_KEYS}")
    keys = tuple(_key(table, f"{path}: [[keys]] number {number}") for number, table in enumerate(listed, 1))
    _check_distinct(keys, path)
    return keys


def _place(error: tomllib.TOMLDecodeError) -> str:
    """Return the place of the error. Its text may hold a part of a key, so it is not shown."""
    found = re.search(r"at line \d+", str(error))
    return f"an error {found.group()}" if found else "an error at its end"


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"the api key file {path} is not UTF-8 text", hint=HINT_NEW) from None


def _bare(text: str) -> str | None:
    """Return the key of a file with one line; None for one with more."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1:
        return None
    return lines[0] if lines else ""


def _check_distinct(keys: tuple[ApiKey, ...], path: Path) -> None:
    for what, seen in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        for number, value in enumerate(seen, 1):
            first = seen.index(value) + 1  # type: ignore[arg-type]
            if first != number:
                twice = f"two keys are named {value}" if what == "name" else "one key stands there twice"
                raise ConfigError(
                    f"{path}: {twice}: [[keys]] number {first} and number {number}", hint="remove one of them"
                )


def _key(table: dict[str, Any], where: str) -> ApiKey:
    for known in table:
        if known not in _FIELDS:
            raise ConfigError(f"{where} has no field {known[:40]}", hint=f"known are {', '.join(_FIELDS)}")
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(
            f"{where}: name is {_shown(name)}, expected 1 to 64 of a-z, A-Z, 0-9, . _ @ -", hint=_KEYS_HINT
        )
    where = f"{where} ({name})"
    digest, text = _secret(table, where)
    metrics = table.get("metrics", False)
    if not isinstance(metrics, bool):
        raise ConfigError(f"{where}: metrics is {_shown(metrics)}, expected true or false", hint=_KEYS_HINT)
    limits = {limit: _limit(table, limit, where) for limit in LIMIT_NAMES}
    return ApiKey(name, digest, _expiry(table.get("expires"), where), metrics, KeyLimits(**limits), text=text)


def _secret(table: dict[str, Any], where: str) -> tuple[bytes, str | None]:
    key, digest = table.get("key"), table.get("key_sha256")
    if (key is None) == (digest is None):
        raise ConfigError(
            f"{where} has {'both' if key else 'neither'} key and key_sha256, expected one of them",
            hint=_KEYS_HINT,
        )
    if isinstance(digest, str) and _HASH.match(digest):
        return bytes.fromhex(digest), None
    if isinstance(key, str):
        return digest_of(check_key(key, f"{where}: key")), key
    raise ConfigError(
        f"{where}: {'key' if digest is None else 'key_sha256'} is not valid, expected text",
        hint="key_sha256 is 64 digits of 0-9 a-f",
    )


def _limit(table: dict[str, Any], name: str, where: str) -> int | None:
    value = table.get(name)
    if value is not None and (type(value) is not int or not 1 <= value < 1 << 63):
        raise ConfigError(
            f"{where}: {name} is {_shown(value)}, expected a whole number of at least 1", hint=_KEYS_HINT
        )
    return value


def _expiry(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.timestamp()
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC).timestamp()
    raise ConfigError(
        f"{where}: expires is {_shown(value)}, expected a date or a time with a zone",
        hint="expires = 2030-12-31, which is its beginning in UTC, or 2030-12-31T12:00:00Z",
    )


def _shown(value: object) -> str:
    return "missing" if value is None else repr(str(value)[:40])


def bare_text(key: str) -> str:
    """Return the text of a file with one bare key."""
    return f"{key}\n"


def entry_text(name: str, key: str, expires: str | None, limits: KeyLimits, *, hashed: bool) -> str:
    """Return the table of one named key."""
    secret = f'key_sha256 = "{digest_of(key).hex()}"' if hashed else f'key = "{key}"'
    lines = ["[[keys]]", f'name = "{name}"', secret]
    lines += [] if expires is None else [f"expires = {expires}"]
    chosen = {limit: getattr(limits, limit) for limit in LIMIT_NAMES}
    lines += [f"{limit} = {value}" for limit, value in chosen.items() if value is not None]
    return "\n".join(lines) + "\n"


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet, with mode 0600. Raises `ConfigError`."""
    parse_keys(text.encode(), path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already", hint="--name NAME adds a key to a file of named keys"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {(error.strerror or 'unwritable').lower()}", hint=FOLDER_HINT
        ) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def append_entry(path: Path, entry: str) -> None:
    """Add a table to a file of named keys; a reader sees all of it or nothing. Raises `ConfigError`."""
    with _locked(path.parent):
        data = read_key_file(path)
        if _bare(_text(data, path)) is not None and data.strip():
            raise ConfigError(
                f"{path} holds one bare key, and a named key cannot stand beside it",
                hint="name another file, or give that key a table [[keys]] with a name",
            )
        text = data.decode().rstrip("\n")
        _check_new_name(data, entry, path)
        whole = f"{text}\n\n{entry}" if text else entry
        parse_keys(whole.encode(), path)
        _replace(path, whole.encode())


def _check_new_name(data: bytes, entry: str, path: Path) -> None:
    """Raise `ConfigError` if the file has a key of the entry's name already."""
    name = tomllib.loads(entry)["keys"][0]["name"]
    if data.strip() and name in {key.name for key in parse_keys(data, path)}:
        raise ConfigError(
            f"{path} has a key named {name} already",
            hint=f"give another --name, or first remove that table [[keys]] from {path}",
        )


def _replace(path: Path, data: bytes) -> None:
    target = path.resolve()
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(target)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {(error.strerror or 'unwritable').lower()}", hint=FOLDER_HINT
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two commands do not lose each other's entry."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"cannot open {folder}: {(error.strerror or 'unreadable').lower()}", hint=FOLDER_HINT
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
