"""Transcripts: a command line, its exit code and patterns for what it writes.

    $ convoy roster show nothing.toml
    exit 1
    err| error: cannot read nothing.toml: no such file or directory

Commands of one file run in order in one fresh directory. ``out|`` and ``err|`` lines are regular expressions
that must match the whole output of that stream, line by line; ``...`` stands for any lines. A stream without
a pattern must be empty.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from convoy.cli import main

ANY_LINES = "..."


@dataclass
class Command:
    """Hold one command of a transcript with its expected output and exit code."""

    line: str
    number: int
    exit_code: int = 0
    patterns: dict[str, list[str]] = field(default_factory=lambda: {"out": [], "err": []})


def read_transcript(text: str) -> list[Command]:
    """Return the commands of a transcript. Raises ValueError for a line that is none of its grammar."""
    commands: list[Command] = []
    for number, line in enumerate(text.splitlines(), start=1):
        kind, _, rest = line.partition(" ")
        if not line.strip() or line.startswith("#"):
            continue
        if kind == "$":
            commands.append(Command(rest, number))
        elif kind == "exit" and commands:
            commands[-1].exit_code = int(rest)
        elif kind in {"out|", "err|"} and commands:
            commands[-1].patterns[kind.rstrip("|")].append(rest)
        else:
            raise ValueError(f"line {number} of the transcript is none of `$ exit out| err|`: {line}")
    return commands


def run_convoy(
    arguments: list[str],
    directory: Path,
    *,
    text: str = "",
    timeout_s: float = 240.0,
    environment: Mapping[str, str] | None = None,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run the console script's own code in a process of its own, with no terminal.

    ``merged``: standard error is in ``stdout`` too, in the order in which both were written.
    """
    source = str(Path(__file__).resolve().parents[2] / "src")
    return subprocess.run(
        [sys.executable, "-m", "convoy", *arguments],
        cwd=directory,
        env={**kept_environment(), **(environment or {}), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def kept_environment() -> dict[str, str]:
    """Return the variables that a command finds whatever the test gives it."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "TMPDIR") if name in os.environ}


def run_here(
    arguments: list[str], directory: Path, *, text: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which spares a start of Python and of PyTorch. It must end by itself.

    Without an ``environment`` the command has that of this process.
    """
    out, err = io.StringIO(), io.StringIO()
    given = os.environ if environment is None else {**kept_environment(), **environment}
    with (
        mock.patch.dict(os.environ, dict(given), clear=True),
        contextlib.chdir(directory),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", io.StringIO(text)),
    ):
        code = main.run(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def play(command: Command, directory: Path) -> list[str]:
    """Run one command. Return its differences from the transcript, as text."""
    name, *arguments = shlex.split(command.line)
    if name != "convoy":
        raise ValueError(f"line {command.number} runs {name}, expected convoy")
    done = run_here(arguments, directory)
    wrong = []
    if done.returncode != command.exit_code:
        wrong.append(f"line {command.number}: exit {done.returncode}, expected {command.exit_code}")
    for stream, output in (("out", done.stdout), ("err", done.stderr)):
        wanted = command.patterns[stream]
        if not matches(wanted, output.splitlines()):
            wrong.append(
                f"line {command.number}: {stream} is\n{output}and should match\n" + "\n".join(wanted)
            )
    return wrong


def matches(patterns: list[str], lines: list[str]) -> bool:
    """Return whether the lines match the patterns, in full and in order."""
    if not patterns:
        return not lines
    first, *rest = patterns
    if first == ANY_LINES:
        return any(matches(rest, lines[skip:]) for skip in range(len(lines) + 1))
    return bool(lines) and re.fullmatch(first, lines[0].rstrip()) is not None and matches(rest, lines[1:])
