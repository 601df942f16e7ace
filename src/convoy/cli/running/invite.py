"""``convoy serve --invite``: enrol a machine first, in a child process that alone touches the operator key.

The child uses this terminal: it shows the token and asks its question there. The head starts only once the
newcomer is in the roster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from convoy.cli.operator.home import Home
from convoy.cli.show.output import print_note
from convoy.config.settings import load_config
from convoy.errors import InviteError, UsageError
from convoy.sdk.models import describe_model


def _run_with_us(command: list[str]) -> int:
    """Run the command and return its exit code.

    However this process ends, the pipe closes then, and that ends the child.
    """
    ours_read, ours_write = os.pipe()
    try:
        ends = ["--ends-with", str(ours_read)]
        return subprocess.run([*command, *ends], check=False, pass_fds=[ours_read]).returncode
    finally:
        os.close(ours_read)
        os.close(ours_write)


@dataclass(frozen=True, slots=True)
class InviteFlags:
    """Hold the flags of ``serve`` that are for `convoy invite`."""

    config: Path | None
    directory: Path
    auto_approve: bool
    address: list[str] | None
    name: str | None
    port: int | None
    passphrase_file: Path | None = None

    def _check(self, model: str | None) -> None:
        """Raise the model's errors before a machine is invited: `UsageError` or `ModelError`."""
        file = self._file()
        settings = load_config(file if file.exists() else None)
        chosen = model or settings.model_name()
        if chosen is None:
            raise UsageError("no model was named", hint="convoy serve MODEL --invite")
        describe_model(settings, chosen)

    def let_in(self, model: str | None, *, as_json: bool) -> Path:
        """Run `convoy invite` to its end, and return the convoy.toml to continue with.

        If no machine was let in, exit with the child's code: the child has reported the reason. Raises the
        model's errors.
        """
        self._check(model)
        arguments = ["--dir", str(self.directory)]
        if self.config is not None:
            arguments += ["--config", str(self.config)]
        if model is not None:
            arguments += ["--model", model]
        if self.name is not None:
            arguments += ["--name", self.name]
        if self.port is not None:
            arguments += ["--port", str(self.port)]
        if self.passphrase_file is not None:
            arguments += ["--passphrase-file", str(self.passphrase_file)]
        for place in self.address or ():
            arguments += ["--address", place]
        arguments += ["--auto-approve"] * self.auto_approve + ["--json"] * as_json
        code = _run_with_us([sys.executable, "-m", "convoy", "invite", *arguments])
        if code < 0:
            raise InviteError(
                f"the invitation's process was ended by signal {-code}", hint="start this command again"
            )
        if code != 0:
            raise typer.Exit(code)
        self._tell_where_the_key_lies()
        return self._file()

    def _tell_where_the_key_lies(self) -> None:
        from convoy.crypto.identity import has_passphrase

        key = Home(self.directory).operator
        secured = "with a passphrase" if has_passphrase(key) else "without a passphrase"
        print_note(
            f"the operator key lies on this machine, in {key}, {secured}. This server does not need it: move "
            f"that folder to a removable disk, and let the next machine in with "
            f"`convoy invite --operator FOLDER`"
        )

    def _file(self) -> Path:
        return self.config or Home(self.directory).config
