"""Pass the question of ``convoy invite`` to the page of the same user's head, and the answer back.

The two processes share a folder that only their user may enter. ``convoy invite`` writes a question there and
holds a lock on it, so a question of a process that has ended counts no more. The head lists the questions,
and writes the answer of a person. The operator key stays in ``convoy invite``, which checks the answer again.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from convoy.config.files import check_own_folder, make_own_folder
from convoy.config.type_resolution import resolved
from convoy.errors import ConfigError, RequestError

# A name of a DNS host has 253 characters, and an address a port too.
_Text = Annotated[str, msgspec.Meta(max_length=300)]
_ID = re.compile(r"[0-9a-f]{32}\Z")
_QUESTION, _ANSWER = ".question", ".answer"
_MAX_BYTES = 4096
_OLD_S = 3600.0
# More than one person compares at once.
_MAX_LISTED = 16
_Decoded = TypeVar("_Decoded")


class InvitationQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe a newcomer that used an invitation up and waits. Its texts are the newcomer's own."""

    id: _Text
    name: _Text
    address: _Text
    called_from: _Text
    fingerprint: _Text
    code: _Text
    expires_unix_s: float


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # The head of another cluster does not list it.
    operator_key: _Text
    question: InvitationQuestion


class _Answered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: _Text
    approves: bool


class InvitationList:
    """List and answer the questions of one cluster, for its head. Reads files, so call it on a thread.

    ``operator_key`` is that of the head's convoy.toml, in hex. A head without one has no ``folder``. ``now``
    is Unix time in seconds.
    """

    def __init__(self, folder: Path | None, operator_key: str, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._operator_key = operator_key
        self._now = now

    def pending(self) -> list[InvitationQuestion]:
        """Return the questions that wait for an answer.

        None waits in a folder that others can enter: ``convoy invite`` refuses it and says so.
        """
        if self._folder is None:
            return []
        try:
            check_own_folder(self._folder)
            paths = sorted(self._folder.glob(f"*{_QUESTION}"))
        except (OSError, ConfigError):
            return []
        waiting = (self._find(path) for path in paths if _ID.match(path.stem))
        return [question for question in waiting if question is not None][:_MAX_LISTED]

    def answer(self, invitation_id: str, code: str, *, approves: bool) -> None:
        """Write the answer to the question that shows ``code``. Raises `RequestError` if none waits."""
        question = next((one for one in self.pending() if one.id == invitation_id), None)
        if question is None or self._folder is None:
            raise RequestError(
                "no machine waits with this invitation: it was answered, went away, or waited for 5 minutes",
                hint="`convoy invite` says on its terminal how it ended",
            )
        if code != question.code:
            raise RequestError(
                "the code is not the one of the machine that waits", hint="compare the codes of both screens"
            )
        data = msgspec.json.encode(_Answered(code, approves))
        with suppress(FileExistsError):
            # Of two answers the first one counts. Its author sees the question go.
            os.close(_create(self._folder / f"{invitation_id}{_ANSWER}", data))

    def _find(self, path: Path) -> InvitationQuestion | None:
        asked = _read(path, _Asked, must_be_locked=True)
        if asked is None or asked.operator_key != self._operator_key:
            return None
        question = asked.question
        is_answered = os.path.lexists(path.with_suffix(_ANSWER))
        is_over = self._now() >= question.expires_unix_s
        return None if question.id != path.stem or is_answered or is_over else question


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """Hold a question that a page may answer. `asked_on_page` makes it."""

    path: Path
    code: str

    def answer(self) -> bool | None:
        """Return the answer of a page, or None as long as there is none for this code."""
        found = _read(self.path.with_suffix(_ANSWER), _Answered)
        return None if found is None or found.code != self.code else found.approves


@contextmanager
def asked_on_page(folder: Path, operator_key: str, question: InvitationQuestion) -> Iterator[OpenQuestion]:
    """Show ``question`` on the pages of a cluster's head while the block runs.

    Raises `ConfigError` if the folder cannot be written, or is not of this user alone.
    """
    path = folder / f"{question.id}{_QUESTION}"
    try:
        make_own_folder(folder)
        _remove_old(folder)
        descriptor = _create(path, msgspec.json.encode(_Asked(operator_key, question)))
    except OSError as error:
        reason = (error.strerror or "unusable").lower()
        raise ConfigError(
            f"cannot write a question in {folder}: {reason}",
            hint="set XDG_CACHE_HOME to a folder of yours, for the head too",
        ) from None
    try:
        yield OpenQuestion(path, question.code)
    finally:
        path.unlink(missing_ok=True)
        path.with_suffix(_ANSWER).unlink(missing_ok=True)
        # This ends the lock too.
        os.close(descriptor)


def _create(path: Path, data: bytes) -> int:
    """Write a new file, and return it open and locked. A reader meets half of it as if it were not there."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        # Without locks, the expiry alone ends a question.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, data)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _read(path: Path, kind: type[_Decoded], *, must_be_locked: bool = False) -> _Decoded | None:
    """Return the contents of a private file of this user; None if it is another thing, or not one yet."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not is_ours or (must_be_locked and not _is_locked(descriptor)):
            return None
        return msgspec.json.decode(os.read(descriptor, _MAX_BYTES), type=resolved(kind))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        # The lock is held, or the file system has no locks: then the question counts until it expires.
        return True
    return False


def _remove_old(folder: Path) -> None:
    """Remove what processes left behind that were killed. A question waits for minutes."""
    for path in folder.iterdir():
        with suppress(OSError):
            if _ID.match(path.stem) and time.time() - path.lstat().st_mtime >= _OLD_S:
                path.unlink()
