"""Keep a member's accepted state on its own disk: the newest roster and the operator key that it trusts now.

It is one file, replaced as a whole, so that a crash leaves the old state or the new one. So a member
remembers over a restart: it refuses an older roster, or one by an operator that handed over, as before.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from convoy.config.files import FOLDER_HINT
from convoy.errors import IdentityError
from convoy.trust.roster.roster import MAX_ROSTER_BYTES

DIRECTORY = "accepted"
FILE = "newest"

_FIRST_LINE = re.compile(rb"# convoy accepted v1 configured=([0-9a-f]{64}) trusted=([0-9a-f]{64})\n")
_MAX_BYTES = MAX_ROSTER_BYTES + 1024


@dataclass(frozen=True, slots=True)
class Accepted:
    """Hold the state.

    ``configured`` is the operator key of convoy.toml then; ``trusted`` is the one that counts now.
    """

    configured: bytes
    trusted: bytes
    signed: bytes = field(repr=False)


class AcceptedFile:
    """Read and write ``<identity>/accepted/newest``, mode 0600."""

    def __init__(self, identity: Path) -> None:
        self.identity = identity
        self.path = identity / DIRECTORY / FILE

    def load(self) -> Accepted | None:
        """Return the state, or None if nothing was accepted yet.

        Raises `IdentityError` for a file that others may have changed.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise IdentityError(f"cannot read {self.path}: {_why(error)}", hint=FOLDER_HINT) from error
        # The open file is checked, so that it cannot be exchanged in between.
        if status.st_mode & 0o022 or status.st_uid != os.getuid():
            raise IdentityError(
                f"{self.path} can be changed by others",
                hint=f"find out which user changed it, then chmod 600 {self.path}",
            )
        match = _FIRST_LINE.match(data)
        if match is None or len(data) > _MAX_BYTES:
            raise IdentityError(
                f"{self.path} has another form than this member writes",
                hint="restore it from a backup; without it this member would take older rosters again",
            )
        return Accepted(
            bytes.fromhex(match[1].decode()), bytes.fromhex(match[2].decode()), data[match.end() :]
        )

    def save(self, accepted: Accepted) -> None:
        """Write the state; it is on disk when this returns. Raises `IdentityError`."""
        first = (
            f"# convoy accepted v1 configured={accepted.configured.hex()} trusted={accepted.trusted.hex()}\n"
        )
        directory = self.path.parent
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            # `mkstemp` makes the file with mode 0600.
            descriptor, name = tempfile.mkstemp(dir=directory, prefix=f".{FILE}.")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(first.encode() + accepted.signed)
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).replace(self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(name).unlink()
                raise
            # The rename itself must reach the disk too.
            _sync(directory)
        except OSError as error:
            raise IdentityError(f"cannot write {self.path}: {_why(error)}", hint=FOLDER_HINT) from error


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why(error: OSError) -> str:
    return (error.strerror or "unusable").lower()
