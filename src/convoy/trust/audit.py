"""Keep the audit log: the acts of operators, administrators and members, as a file of chained signed entries.

A line is one entry: canonical JSON with a number, the SHA-256 of the line before and a signature by the key
that acts. Layout: docs/protocol.md, "Audit log". An entry is on disk before its action is done: an action is
refused if its entry cannot be written.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import pwd
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from convoy.crypto.identity import verify
from convoy.crypto.keyfile import check_private_file, make_private_directory, sync_directory
from convoy.crypto.keys import prefixed
from convoy.errors import AuditError, HandshakeError, IdentityError

_COMPARE = "compare the log with a copy of it from another place, such as a backup"

FILE = "audit.jsonl"
VERSION = 1
MAX_ENTRY_BYTES = 16 * 1024
FIRST_PREVIOUS = "0" * 64
TORN = "remove torn line"

_LABEL = b"convoy audit v1"
_LOCK_TIMEOUT_S = 10.0
_LOCK_POLL_S = 0.02
_MAX_TEXT = 512
_FIELDS: dict[str, type] = {
    "action": str,
    "actor": str,
    "from": str,
    "key": str,
    "previous": str,
    "sequence": int,
    "signature": str,
    "subject": dict,
    "time": str,
    "version": int,
}

Clock = Callable[[], datetime.datetime]
# The values are those of JSON.
Subject = Mapping[str, object]


class Signer(Protocol):
    """Sign as a key that acts: an operator's, or a member's identity."""

    public_key: bytes

    def sign(self, data: bytes) -> bytes:
        """Return an Ed25519 signature."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Hold one line of a log.

    ``hash`` is the hex SHA-256 of the line without its line break. The next entry names it.
    """

    number: int
    fields: Mapping[str, Any]
    hash: str


@dataclass(frozen=True, slots=True)
class VerifiedLog:
    """Describe a chain that was verified.

    ``head`` is the last entry's hash. ``num_torn_bytes`` is the length of a last line without a line break.
    ``num_after`` counts the entries after the expected one; None if none was expected.
    """

    num_entries: int
    key: str | None
    head: str
    num_torn_bytes: int
    num_after: int | None


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def local_origin() -> str:
    """Return the user of this process, and the terminal if there is one."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return f"user {name} at {os.ttyname(sys.stdin.fileno())}"
    return f"user {name}"


class AuditLog:
    """Append entries to one file under one key. A file lock orders several processes and threads."""

    def __init__(
        self,
        path: Path,
        signer: Signer,
        actor: str,
        *,
        now: Clock = utc_now,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
    ) -> None:
        self.path = path
        self._signer = signer
        self._actor = actor
        self._now = now
        self._lock_timeout_s = lock_timeout_s

    def append(
        self, action: str, subject: Subject, *, actor: str | None = None, origin: str | None = None
    ) -> Entry:
        """Write one entry, and return it once it is on disk. Call this before the action.

        ``subject`` has names, ids and digests, never secrets. ``actor`` and ``origin`` replace the log's own
        actor and this process's user. Raises `AuditError`: then the action must not be done.
        """
        try:
            with self._locked() as descriptor:
                return self._append(
                    descriptor, action, subject, actor or self._actor, origin or local_origin()
                )
        except OSError as error:
            raise _unwritable(self.path, (error.strerror or "it failed").lower()) from error
        except IdentityError as error:
            raise AuditError(f"the audit log: {error.message}", hint=error.hint) from error

    @contextlib.contextmanager
    def doing(self, action: str, subject: Subject) -> Iterator[None]:
        """Append an entry before the block, and another one if the block fails. Raises `AuditError`."""
        begun = self.append(action, subject)
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(AuditError):
                failed: Subject = {"sequence": begun.number, "error": type(error).__name__}
                self.append(f"failed: {action}", failed)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        make_private_directory(self.path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            check_private_file(self.path, os.fstat(descriptor))
            self._wait_for_lock(descriptor)
            yield descriptor
        finally:
            # Closing gives the lock back, as the end of the process does.
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int) -> None:
        until_s = time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    why = f"another process has held its lock for {self._lock_timeout_s:g} s"
                    raise _unwritable(self.path, why) from None
                time.sleep(_LOCK_POLL_S)
            else:
                return

    def _append(self, descriptor: int, action: str, subject: Subject, actor: str, origin: str) -> Entry:
        size = os.fstat(descriptor).st_size
        start = max(0, size - 2 * (MAX_ENTRY_BYTES + 1))
        tail = os.pread(descriptor, size - start, start)
        # A crash may have left a last line without its line break. The tail holds two entries, so it has the
        # last whole one too.
        whole, end, torn = tail.rpartition(b"\n")
        last = self._last(whole.rpartition(b"\n")[2]) if end else None
        if last is None and size > len(torn):
            raise AuditError(f"{self.path}: its last line is longer than {MAX_ENTRY_BYTES} bytes")
        if len(torn) > MAX_ENTRY_BYTES:
            raise AuditError(f"{self.path}: its torn last line is longer than {MAX_ENTRY_BYTES} bytes")
        lines = []
        # A torn line may have been an action's entry, so its removal gets an entry of its own.
        if torn:
            found = {"num_bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()}
            lines.append(self._line(TORN, found, self._actor, origin, last))
            last = _entry(lines[-1])
        lines.append(self._line(action, subject, actor, origin, last))
        self._write(descriptor, size - len(torn), torn, b"".join(line + b"\n" for line in lines))
        if size == 0:
            # A new file's name must reach the disk too.
            sync_directory(self.path.parent)
        return _entry(lines[-1])

    def _last(self, line: bytes) -> Entry:
        """Return the last entry, after checking it. Raises `AuditError`, also for an entry by another key.

        No entry is appended to a chain that is broken at its end.
        """
        try:
            entry = _entry(line)
            _check_signature(entry)
        except AuditError as error:
            raise AuditError(
                f"{self.path}: its last entry does not hold: {error.message}",
                hint=f"`convoy audit verify {self.path}` says more; move the file away to begin another",
            ) from error
        ours = self._signer.public_key.hex()
        if entry.fields["key"] != ours:
            raise AuditError(
                f"{self.path} is the log of key {entry.fields['key'][:16]}..., and {ours[:16]}... acts here",
                hint="move the file away: every key has a log of its own",
            )
        return entry

    def _line(self, action: str, subject: Subject, actor: str, origin: str, last: Entry | None) -> bytes:
        fields: dict[str, Any] = {
            "action": action,
            "actor": actor[:_MAX_TEXT],
            "from": origin[:_MAX_TEXT],
            "key": self._signer.public_key.hex(),
            "previous": FIRST_PREVIOUS if last is None else last.hash,
            "sequence": 1 if last is None else last.number + 1,
            "subject": dict(subject),
            "time": self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "version": VERSION,
        }
        fields["signature"] = self._signer.sign(bytes_to_sign(fields)).hex()
        line = canonical_entry(fields)
        if len(line) > MAX_ENTRY_BYTES:
            raise AuditError(f"an audit entry has {len(line)} bytes, and {MAX_ENTRY_BYTES} is the limit")
        return line

    def _write(self, descriptor: int, at: int, before: bytes, data: bytes) -> None:
        """Write ``data`` at ``at``, in place of the torn line ``before``.

        A failed write leaves the file as it was.
        """
        try:
            written = os.pwrite(descriptor, data, at)
            if written != len(data):
                raise _unwritable(self.path, f"{written} of {len(data)} bytes were written")
            os.ftruncate(descriptor, at + len(data))
            os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, at)
                os.pwrite(descriptor, before, at)
            raise


def read_entries(path: Path) -> Iterator[Entry | int]:
    """Yield the entries of a log in order, and at the end the number of bytes of a torn last line, if any.

    Only their form is checked. Raises `AuditError`, naming the line.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_ENTRY_BYTES + 2):
                number += 1
                if not line.endswith(b"\n"):
                    if len(line) > MAX_ENTRY_BYTES:
                        raise AuditError(
                            f"{path}: line {number} is longer than {MAX_ENTRY_BYTES} bytes", hint=_COMPARE
                        )
                    yield len(line)
                    return
                try:
                    yield _entry(line[:-1])
                except AuditError as error:
                    raise AuditError(f"{path}: line {number}: {error.message}", hint=_COMPARE) from error
    except OSError as error:
        hint = "name the audit.jsonl beside the key that acts, or its folder"
        raise AuditError(
            f"cannot read {path}: {(error.strerror or 'it failed').lower()}", hint=hint
        ) from error


def verify_log(path: Path, *, expected: str | None = None, key: str | None = None) -> VerifiedLog:
    """Check every signature, number and link of a log.

    ``expected`` is a hash noted before, which must be in the chain. ``key`` must have signed every entry.
    Raises `AuditError` for an entry that was changed, moved, removed or made by another key, and for an end
    that was cut off before the expected hash.
    """
    num_entries, head, num_torn, found_at = 0, FIRST_PREVIOUS, 0, None
    if expected == FIRST_PREVIOUS:
        found_at = 0
    for entry in read_entries(path):
        if isinstance(entry, int):
            num_torn = entry
            continue
        where = f"{path}: entry {num_entries + 1}"
        if entry.number != num_entries + 1:
            raise AuditError(
                f"{where} has number {entry.number}: an entry was moved, removed or added", hint=_COMPARE
            )
        if entry.fields["previous"] != head:
            raise AuditError(
                f"{where} does not follow the entry before it: one of the two was changed", hint=_COMPARE
            )
        # Without a given key, the first entry's key must sign all others.
        key = key or entry.fields["key"]
        if entry.fields["key"] != key:
            raise AuditError(
                f"{where} is of key {entry.fields['key'][:16]}..., expected {key[:16]}...", hint=_COMPARE
            )
        try:
            _check_signature(entry)
        except AuditError as error:
            raise AuditError(f"{where}: {error.message}", hint=_COMPARE) from error
        num_entries, head = entry.number, entry.hash
        if head == expected:
            found_at = num_entries
    if expected is not None and found_at is None:
        raise AuditError(
            f"{path} has no entry with the expected hash {expected[:16]}...: its end was cut off, or it is "
            f"another log",
            hint=f"it ends with entry {num_entries}, hash {head}",
        )
    return VerifiedLog(num_entries, key, head, num_torn, None if found_at is None else num_entries - found_at)


def _entry(line: bytes) -> Entry:
    """Return the entry of a line. Raises `AuditError` if it is no entry, or not written in canonical form."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise AuditError("it is not JSON") from None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS.keys():
        raise AuditError("it has not the fields of an entry")
    for name, kind in _FIELDS.items():
        if type(fields[name]) is not kind:
            raise AuditError(f"its field {name} is not of type {kind.__name__}")
    if fields["version"] != VERSION:
        raise AuditError(f"it has version {fields['version']}, expected {VERSION}")
    # Every entry has one spelling, so that the hash of the line is the hash of the fields.
    if canonical_entry(fields) != line:
        raise AuditError("it is not written as canonical JSON")
    return Entry(fields["sequence"], fields, hashlib.sha256(line).hexdigest())


def _check_signature(entry: Entry) -> None:
    unsigned = {name: value for name, value in entry.fields.items() if name != "signature"}
    try:
        key, signature = (bytes.fromhex(entry.fields[name]) for name in ("key", "signature"))
        verify(key, signature, bytes_to_sign(unsigned))
    except (ValueError, HandshakeError):
        raise AuditError("its signature does not hold: it was changed") from None


def bytes_to_sign(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes that an entry's signature covers, from its fields without the signature."""
    return prefixed(_LABEL, canonical_entry(fields))


def canonical_entry(fields: Mapping[str, Any]) -> bytes:
    """Return the one spelling of an entry: its line in the log, without the end of the line."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _unwritable(path: Path, why: str) -> AuditError:
    return AuditError(
        f"cannot write the audit log {path}: {why}",
        hint="nothing was done: an action that is not in the log is not allowed",
    )
