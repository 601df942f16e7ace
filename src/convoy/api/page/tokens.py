"""Keep the tokens of ``convoy open`` as files that only one user can write, and use each of them once.

A token itself is never on disk. The name of its file is a hash of the token and of the port of the head, so
that another head of the same user refuses it. To use a token is to remove its file, which succeeds once.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from convoy.config.files import check_own_folder, make_own_folder
from convoy.errors import ConfigError

Scope = Literal["view", "operate"]

TOKEN_LIFE_S = 300.0
# A token is 256 random bits in base 64, after the letter of its scope.
_TOKEN = re.compile(r"[vo][A-Za-z0-9_-]{43}\Z")
_SCOPES: dict[str, Scope] = {"v": "view", "o": "operate"}
_FILE = re.compile(r"[0-9a-f]{64}\Z")


class OpenTokens:
    """Make and use tokens in one folder. ``now`` is Unix time in seconds, as files have it."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._now = now

    def make(self, port: int, scope: Scope) -> str:
        """Return a new token for the head at ``port``. Raises `ConfigError` for a folder that is not safe."""
        try:
            make_own_folder(self.folder)
            self._remove_old()
            token = scope[0] + secrets.token_urlsafe(32)
            path = self.folder / _name(token, port)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            # The head compares this time with its clock, which may be a test's.
            os.utime(path, (self._now(), self._now()))
        except OSError as error:
            reason = (error.strerror or "unusable").lower()
            raise ConfigError(
                f"cannot write a token in {self.folder}: {reason}",
                hint="set XDG_CACHE_HOME to a folder of yours, for the head too",
            ) from None
        return token

    def use(self, token: str, port: int) -> Scope | None:
        """Return the scope of ``token`` and end it; None if it is wrong, was used, or is too old.

        Raises `ConfigError` if others can write the folder.
        """
        if _TOKEN.match(token) is None:
            return None
        path = self.folder / _name(token, port)
        try:
            check_own_folder(self.folder)
            found = os.lstat(path)
            # Of two requests with one token, only one removes the file.
            path.unlink()
        except OSError:
            return None
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
        age_s = self._now() - found.st_mtime
        return _SCOPES[token[0]] if is_ours and -1.0 <= age_s < TOKEN_LIFE_S else None

    def _remove_old(self) -> None:
        for path in self.folder.iterdir():
            # A head may use the token at this moment.
            with suppress(OSError):
                if _FILE.match(path.name) and self._now() - path.lstat().st_mtime >= TOKEN_LIFE_S:
                    path.unlink()


def _name(token: str, port: int) -> str:
    return hashlib.sha256(f"convoy open\n{port}\n{token}".encode()).hexdigest()
