"""The loop that every agent runs: read a file, run a command, edit the file, answer.

`TASKS` has the agent's own words for it: its arguments, and its tools with their arguments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from convoy.testing import ScriptedCall

QUESTION = "Read note.txt, run the check, correct the note, and tell me what it says."
ANSWER = "The note is corrected: it greets the evening now."
BEFORE, AFTER = "good morning", "good evening"
# It is long, so that a member can be lost in the middle of the call. It writes the user's number.
CHECK = "id -u > checked.txt && echo the check of the note has been run to its end and has found one mistake"
# The turn of `CHECK`.
CHECK_TURN = 1
UNPRIVILEGED = 65534
_LOOP_S = 400.0


@dataclass(frozen=True, slots=True)
class Task:
    """Describe the task of one agent. ``calls`` makes its three calls in the agent's folder."""

    arguments: tuple[str, ...]
    calls: Callable[[Path], tuple[ScriptedCall, ScriptedCall, ScriptedCall]]


def _codex(folder: Path) -> tuple[ScriptedCall, ScriptedCall, ScriptedCall]:
    patch = f"*** Begin Patch\n*** Update File: note.txt\n@@\n-{BEFORE}\n+{AFTER}\n*** End Patch\n"
    commands = ("cat note.txt", CHECK, f"apply_patch <<'EOF'\n{patch}EOF\n")
    first, second, third = (ScriptedCall("exec_command", {"cmd": command}) for command in commands)
    return first, second, third


def _claude(folder: Path) -> tuple[ScriptedCall, ScriptedCall, ScriptedCall]:
    path = str(folder / "note.txt")
    return (
        ScriptedCall("Read", {"file_path": path}),
        ScriptedCall("Bash", {"command": CHECK, "description": "Run the check"}),
        ScriptedCall("Edit", {"file_path": path, "old_string": BEFORE, "new_string": AFTER}),
    )


def _opencode(folder: Path) -> tuple[ScriptedCall, ScriptedCall, ScriptedCall]:
    path = str(folder / "note.txt")
    return (
        ScriptedCall("read", {"filePath": path}),
        ScriptedCall("bash", {"command": CHECK}),
        ScriptedCall("edit", {"filePath": path, "oldString": BEFORE, "newString": AFTER}),
    )


def _cline(folder: Path) -> tuple[ScriptedCall, ScriptedCall, ScriptedCall]:
    path = str(folder / "note.txt")
    return (
        ScriptedCall("read_files", {"files": [{"path": path}]}),
        ScriptedCall("run_commands", {"commands": [CHECK]}),
        ScriptedCall("editor", {"path": path, "old_text": BEFORE, "new_text": AFTER}),
    )


TASKS: Mapping[str, Task] = {
    # The namespace holds the agent, and a sandbox inside it would need another one.
    "codex": Task(
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION),
        _codex,
    ),
    "claude": Task(("-p", QUESTION, "--permission-mode", "bypassPermissions"), _claude),
    "opencode": Task(("run", "--auto", QUESTION), _opencode),
    "cline": Task(("--json", "--auto-approve", "true", QUESTION), _cline),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell how an agent's run ended. ``left`` are the commands of processes that outlived it."""

    code: int
    output: str
    left: tuple[str, ...]
    seconds: float


class Home:
    """Hold one agent's own folders: its home, and the work folder with the note."""

    def __init__(self, place: Path, name: str) -> None:
        self.name = name
        self._root = place / name
        self._programs = place / "programs" / "bin"
        self.work = self._root / "work"

    def renew(self) -> None:
        """Make the folders anew, with the note as it is before the loop."""
        shutil.rmtree(self._root, ignore_errors=True)
        for folder in (self.work, self._home, self._settings, self._temporary):
            folder.mkdir(parents=True)
        (self.work / "note.txt").write_text(f"{BEFORE}\n")
        for path in (self._root, *self._root.rglob("*")):
            os.chown(path, UNPRIVILEGED, UNPRIVILEGED)

    def run(self, url: str) -> Ended:
        """Run the agent's task against ``url``, as an unprivileged user with no variables of this process."""
        command, environment = self._launched(url)
        given = {
            **environment,
            "HOME": str(self._home),
            "PATH": f"{self._programs}:/usr/local/bin:/usr/bin:/bin",
            "TERM": "dumb",
            "TMPDIR": str(self._temporary),
        }
        lowered = ["setpriv", f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"]
        log = self._root / "output.txt"
        began_s = time.monotonic()
        with log.open("wb") as output:
            agent = subprocess.Popen(
                [*lowered, "env", "-i", *(f"{name}={value}" for name, value in given.items()), *command],
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = agent.wait(_LOOP_S)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                left = _end_all(agent)
        return Ended(code, log.read_text(errors="replace"), left, time.monotonic() - began_s)

    def _launched(self, url: str) -> tuple[list[str], dict[str, str]]:
        """Return the command and the variables of `convoy launch`, and write its files."""
        flags = ["--url", url, "--print", "--json", "--", *TASKS[self.name].arguments]
        done = subprocess.run(
            [sys.executable, "-m", "convoy", "launch", self.name, *flags],
            capture_output=True,
            text=True,
            check=True,
        )
        # The names of the folder and of the key, as the command shows them.
        shown = done.stdout.replace("FOLDER", str(self._settings)).replace("(the API key)", "unused")
        found: dict[str, Any] = json.loads(shown)
        for path, text in found["files"].items():
            Path(path).write_text(text)
            os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
        return found["command"], found["environment"]

    @property
    def _home(self) -> Path:
        return self._root / "home"

    @property
    def _settings(self) -> Path:
        return self._root / "settings"

    @property
    def _temporary(self) -> Path:
        return self._root / "tmp"


def _end_all(agent: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """End the agent and every process that it has left behind, by their ids; return the commands of those."""
    if agent.poll() is None:
        agent.kill()
        agent.wait()
    left = []
    for process in psutil.process_iter():
        try:
            ours = os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net")
            if ours and process.uids().real == UNPRIVILEGED:
                left.append(" ".join(process.cmdline()))
                process.kill()
        except (OSError, psutil.Error):
            # It has ended meanwhile.
            continue
    return tuple(left)
