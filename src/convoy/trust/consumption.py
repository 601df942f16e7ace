"""Record on disk that an invitation was used once: a file is created, and its creation is the use itself.

``<id>.used`` is created exclusively and reaches the disk before any newcomer is answered. ``<id>.ended``
later records the outcome. So after a crash at any point an invitation is either unused or used, never both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from convoy.config.files import FOLDER_HINT
from convoy.crypto.keyfile import make_private_directory, sync_directory, write_private
from convoy.errors import IdentityError, InviteError

USED = ".used"
ENDED = ".ended"
ENROLLED = "enrolled"
DECLINED = "declined"
GONE = "gone"

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Consumption:
    """Hold the durable state of one invitation, in a private directory of the operator's."""

    directory: Path
    invitation_id: str

    @property
    def used(self) -> bool:
        return self._file(USED).exists()

    def consume(self, who: str) -> None:
        """Use the invitation up for ``who`` (text for people). Raises `InviteError` if it is used already.

        Of two processes that hold the same invitation, only one can succeed.
        """
        make_private_directory(self.directory)
        try:
            write_private(self._file(USED), f"{who}\n".encode())
            sync_directory(self.directory)
        except OSError as error:
            # The disk may be full. The file counts if it is there, and no newcomer gets in.
            raise IdentityError(
                f"cannot write to {self.directory}: {error.strerror}",
                hint=FOLDER_HINT,
            ) from error
        except IdentityError as error:
            if not self.used:
                raise
            raise InviteError(
                "the invitation is used up", hint="make a new one with `convoy invite`"
            ) from error

    def end(self, outcome: str) -> None:
        """Record the outcome: `ENROLLED`, `DECLINED` or `GONE`."""
        write_private(self._file(ENDED), f"{outcome}\n".encode())
        sync_directory(self.directory)

    def _file(self, suffix: str) -> Path:
        return self.directory / f"{self.invitation_id}{suffix}"


def unfinished(directory: Path) -> list[str]:
    """Return the newcomers with invitations that were used up without an outcome.

    The process of such an invitation ended in between.
    """
    try:
        used = sorted(directory.glob(f"*{USED}"))
    except OSError:
        return []
    return [
        file.read_text(encoding="utf-8", errors="replace").strip()[:200]
        for file in used
        if _ID.fullmatch(file.stem) and not file.with_suffix(ENDED).exists()
    ]


def forget(directory: Path) -> None:
    """Give every invitation without an outcome the outcome ``interrupted``, after the operator was told."""
    for file in directory.glob(f"*{USED}"):
        if _ID.fullmatch(file.stem) and not file.with_suffix(ENDED).exists():
            Consumption(directory, file.stem).end("interrupted")
