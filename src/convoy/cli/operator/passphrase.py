"""The operator key's passphrase: from a file, or asked on the terminal."""

from __future__ import annotations

import getpass
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.audit import operator_log
from convoy.cli.show.output import print_note
from convoy.errors import IdentityError, UsageError

if TYPE_CHECKING:
    from convoy.crypto.identity import OperatorKey

_MAX_TRIES = 3

PassphraseFlag = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        help="File (0600) with the operator key's passphrase.  [default: ask on the terminal]",
    ),
]
NewPassphraseFlag = Annotated[
    Path | None,
    typer.Option(
        "--new-passphrase-file",
        help="File (0600) with the new operator key's passphrase.  [default: ask on the terminal]",
    ),
]


@dataclass(frozen=True, slots=True)
class Passphrase:
    """Read a passphrase from ``file``, or from the terminal if there is one and ``file`` is None."""

    file: Path | None = None
    flag: str = "--passphrase-file"

    def load(self, directory: Path) -> OperatorKey:
        """Return the key in ``directory``; ask only if it has a passphrase. Raises `IdentityError`."""
        from convoy.crypto.identity import OperatorKey

        return OperatorKey.load(directory, lambda: self._to_open(directory))

    def make(self, directory: Path) -> OperatorKey:
        """Return a new operator key in ``directory``. Raises `IdentityError`.

        Its passphrase is that of the file; without a file a person chooses one, or none, on the terminal.
        Without a terminal it has none.
        """
        from convoy.crypto.identity import OperatorKey

        key = OperatorKey.generate()
        passphrase = self.choose(directory, may_be_empty=True)
        key.save(directory, passphrase)
        if passphrase is None:
            print_note(
                f"the operator key in {directory} has no passphrase: only the mode of its file (0600) "
                "protects it, and a copy can sign any machine in. "
                f"`convoy identity passphrase {directory}` sets one"
            )
        operator_log(directory, key).append("make operator key", {"passphrase": passphrase is not None})
        return key

    def load_or_make(self, directory: Path) -> OperatorKey:
        """Return the operator key in ``directory``, made if there is none. Raises `IdentityError`."""
        from convoy.crypto.identity import OPERATOR_KEY

        return self.load(directory) if (directory / OPERATOR_KEY).exists() else self.make(directory)

    def choose(self, directory: Path, *, may_be_empty: bool) -> str | None:
        """Return a new passphrase for the key in ``directory``, asked twice; None where there is none."""
        if self.file is not None:
            return read_passphrase(self.file)
        if not _on_terminal():
            return None
        empty = " (Enter alone: none)" if may_be_empty else ""
        for _ in range(_MAX_TRIES):
            first = self._ask(f"new passphrase for the operator key in {directory}{empty}: ")
            if not first and may_be_empty:
                return None
            if first and self._ask("the same once more: ") == first:
                return first
            print_note("the two are not equal" if first else "it is empty")
        raise UsageError("no passphrase was chosen", hint=f"{self.flag} FILE reads it from a file")

    def _to_open(self, directory: Path) -> str:
        if self.file is not None:
            return read_passphrase(self.file)
        if not _on_terminal():
            raise IdentityError(
                "the key has a passphrase, and there is no terminal to ask for it",
                hint=f"{self.flag} FILE reads it from a file with mode 0600",
            )
        return self._ask(f"passphrase of the operator key in {directory}: ")

    def _ask(self, prompt: str) -> str:
        try:
            return getpass.getpass(prompt)
        except EOFError:
            hint = f"{self.flag} FILE reads it from a file"
            raise UsageError("no passphrase was given", hint=hint) from None


def read_passphrase(file: Path) -> str:
    """Return the one line of a private file. Raises `IdentityError`, which shows nothing of it."""
    from convoy.crypto.key_envelope import MAX_PASSPHRASE_BYTES
    from convoy.crypto.keyfile import read_private

    try:
        data = read_private(file)
    except IdentityError as error:
        hint = f"chmod 600 {file}" if error.__cause__ is None else "name the file that holds the passphrase"
        raise IdentityError(f"the passphrase file: {error.message}", hint=hint) from error
    line = data.removesuffix(b"\n").removesuffix(b"\r")
    if not 1 <= len(line) <= MAX_PASSPHRASE_BYTES or b"\n" in line or b"\0" in line:
        raise IdentityError(
            f"{file} is no passphrase of one line with 1 to {MAX_PASSPHRASE_BYTES} bytes",
            hint="write the passphrase alone into it, with a line end or without",
        )
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise IdentityError(
            f"{file} is not UTF-8 text", hint="is it the right file? check the path"
        ) from None


def _on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
