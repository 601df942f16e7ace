"""The key that seals saved sessions: beside the member's identity, unless another file is named."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from convoy.cli.operator.home import DEFAULT_HOME, Home
from convoy.cli.show.output import print_note
from convoy.config.settings import load_config
from convoy.errors import IdentityError, SessionError

SESSION_KEY = "session.key"
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Hold the key file of one command.

    ``named``: the command line named the file. ``plain``: files without a seal are allowed.
    """

    path: Path
    named: bool
    plain: bool

    @classmethod
    def of(cls, named: Path | None, config: Path | None, *, plain: bool) -> KeyFile:
        """Return the named file, or ``session.key`` beside the identity of ``config`` or the home folder."""
        if named is not None:
            return cls(named, True, plain)
        identity = None if config is None else load_config(config).cluster.identity
        return cls((identity or Home(DEFAULT_HOME).identity) / SESSION_KEY, False, plain)

    def to_load(self, file: Path) -> bytes | None:
        """Return the key that opens ``file``, or None for a plain one. Raises `SessionError`."""
        from convoy.engine.sessions.file import is_sealed

        if self.named and not self.plain:
            return session_key(self.path, make=False)
        if not is_sealed(file):
            if self.plain:
                return None
            raise SessionError(
                f"{file} is not sealed",
                hint="--plain loads it; any writer of the file may have made it, so load only your own",
            )
        if not self.named and not self.path.exists():
            raise SessionError(
                f"{file} is sealed, and this machine has no session key at {self.path}",
                hint=f"name the key that it was saved under, --key FILE: {SESSION_KEY} beside the identity "
                "of the machine that saved it",
            )
        return session_key(self.path, make=False)

    def to_save(self) -> bytes | None:
        """Return the key that seals a new file, made at its first use; None for a plain one."""
        from convoy.crypto.keyfile import make_private_directory

        if self.plain:
            return None
        if not self.named:
            make_private_directory(self.path.parent)
        return session_key(self.path, make=True)


def session_key(path: Path, *, make: bool) -> bytes:
    """Return the 32 bytes of a key file. Make a missing file if ``make``. Raises SessionError."""
    from convoy.crypto.keyfile import read_private, write_private

    try:
        if make and not path.exists():
            write_private(path, secrets.token_bytes(_KEY_BYTES))
            print_note(f"made the key {path}: without it, the sessions that it seals are lost")
        key = read_private(path)
    except IdentityError as error:
        raise SessionError(f"the session's key: {error.message}", hint=_mend_key(path, error)) from error
    if len(key) != _KEY_BYTES:
        raise SessionError(
            f"{path} has {len(key)} bytes, expected a key of {_KEY_BYTES}",
            hint="name the file that `convoy session --save FILE` made as its key",
        )
    return key


def _mend_key(path: Path, error: IdentityError) -> str | None:
    """Return a hint for a session's key, because the hints of `keyfile` are about a member's key."""
    if isinstance(error.__cause__, FileNotFoundError):
        return "name the key that the session was saved with; without it the session is lost"
    if isinstance(error.__cause__, OSError):
        return None
    return (
        error.hint and f"chmod 600 {path}; anyone with a copy of the key can open the sessions that it seals"
    )
