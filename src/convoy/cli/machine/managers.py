"""Ask the service manager of this machine: systemd, or launchd on macOS, through their commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from convoy.cli.machine.units import LABEL_PREFIX, UNIT_PREFIX, ServiceUnit
from convoy.config.files import config_home, replace_file
from convoy.errors import ConfigError

_COMMAND_S = 60.0


@dataclass(frozen=True, slots=True)
class ServiceState:
    """Describe an installed service. ``state`` is in the manager's words."""

    name: str
    scope: str
    state: str
    text: str
    restarts: int | None
    file: Path


class ServiceManager(Protocol):
    """Install, look at and remove services, of the present user or of the system."""

    @property
    def scope(self) -> str:
        """Return "user" or "system"."""

    def file(self, name: str) -> Path:
        """Return the file of a service."""

    def text(self, unit: ServiceUnit) -> bytes:
        """Return the content of the file."""

    def start(self, name: str) -> list[list[str]]:
        """Return the commands that start a service now and at each boot or login."""

    def end(self, name: str) -> list[list[str]]:
        """Return the commands that stop a service and forget it, before its file is removed."""

    def names(self) -> list[str]:
        """Return the names of the installed services."""

    def state(self, name: str) -> ServiceState:
        """Return the state of an installed service."""

    def log(self, name: str, lines: int, *, follow: bool) -> list[str]:
        """Return the command that shows the end of a service's log."""


@dataclass(frozen=True, slots=True)
class Systemd:
    """Manage units of systemd."""

    system: bool = False

    @property
    def scope(self) -> str:
        return "system" if self.system else "user"

    def file(self, name: str) -> Path:
        folder = Path("/etc/systemd/system") if self.system else config_home() / "systemd/user"
        return folder / f"{UNIT_PREFIX}{name}.service"

    def text(self, unit: ServiceUnit) -> bytes:
        return unit.systemd(self.version())

    def start(self, name: str) -> list[list[str]]:
        # Without --no-block, the command waits until a head has all its peers.
        return [
            self._systemctl("daemon-reload"),
            self._systemctl("enable", "--now", "--no-block", self.file(name).name),
        ]

    def end(self, name: str) -> list[list[str]]:
        return [self._systemctl("disable", "--now", self.file(name).name)]

    def names(self) -> list[str]:
        files = self.file("*")
        return sorted(file.stem.removeprefix(UNIT_PREFIX) for file in files.parent.glob(files.name))

    def state(self, name: str) -> ServiceState:
        unit = self.file(name).name
        wanted = "ActiveState,SubState,StatusText,NRestarts"
        done = run_command(self._systemctl("show", "--property", wanted, unit), check=False)
        found = dict(line.split("=", 1) for line in done.splitlines() if "=" in line)
        state = f"{found['ActiveState']} ({found.get('SubState', '')})" if found else "unknown"
        restarts = found.get("NRestarts", "")
        return ServiceState(
            *(name, self.scope, state, found.get("StatusText", "")),
            restarts=int(restarts) if restarts.isdigit() else None,
            file=self.file(name),
        )

    def log(self, name: str, lines: int, *, follow: bool) -> list[str]:
        scope = "--unit" if self.system else "--user-unit"
        command = ["journalctl", "--no-pager", "--output", "cat", "--lines", str(lines)]
        return [*command, *(["--follow"] if follow else []), scope, self.file(name).name]

    def _systemctl(self, *words: str) -> list[str]:
        return ["systemctl", *([] if self.system else ["--user"]), *words]

    def version(self) -> int:
        words = run_command(["systemctl", "--version"], check=False).split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


@dataclass(frozen=True, slots=True)
class Launchd:
    """Manage property lists of launchd. Written after its manual, and not tried on a Mac."""

    system: bool = False

    @property
    def scope(self) -> str:
        return "system" if self.system else "user"

    def file(self, name: str) -> Path:
        folder = Path("/Library/LaunchDaemons") if self.system else Path.home() / "Library/LaunchAgents"
        return folder / f"{LABEL_PREFIX}{name}.plist"

    def text(self, unit: ServiceUnit) -> bytes:
        return unit.launchd(self._log_file(unit.name))

    def start(self, name: str) -> list[list[str]]:
        return [["launchctl", "bootstrap", self._domain(), str(self.file(name))]]

    def end(self, name: str) -> list[list[str]]:
        return [["launchctl", "bootout", f"{self._domain()}/{self.file(name).stem}"]]

    def names(self) -> list[str]:
        files = self.file("*")
        return sorted(file.stem.removeprefix(LABEL_PREFIX) for file in files.parent.glob(files.name))

    def state(self, name: str) -> ServiceState:
        target = f"{self._domain()}/{self.file(name).stem}"
        lines = run_command(["launchctl", "print", target], check=False).splitlines()
        states = [line.partition("=")[2].strip() for line in lines if line.strip().startswith("state =")]
        state = states[0] if states else "unknown"
        return ServiceState(name, self.scope, state, "", restarts=None, file=self.file(name))

    def log(self, name: str, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self._log_file(name))]

    def _domain(self) -> str:
        return "system" if self.system else f"gui/{os.getuid()}"

    def _log_file(self, name: str) -> Path:
        folder = Path("/Library/Logs") if self.system else Path.home() / "Library/Logs"
        return folder / f"{UNIT_PREFIX}{name}.log"


def manager_here(*, system: bool, platform: str = sys.platform) -> ServiceManager:
    """Return the manager of this machine."""
    return Launchd(system) if platform == "darwin" else Systemd(system)


def write_unit(manager: ServiceManager, unit: ServiceUnit) -> Path:
    """Write the file of a service. Raises ConfigError if there is one already, or the folder is closed."""
    file = manager.file(unit.name)
    if file.exists():
        raise ConfigError(
            f"a service {unit.name} is installed already: {file}",
            hint=f"convoy service uninstall {unit.name}{' --system' if manager.scope == 'system' else ''}",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {file.parent}: {(error.strerror or 'unwritable').lower()}") from None
    if not os.access(file.parent, os.W_OK):
        raise ConfigError(
            f"cannot write {file}: permission denied",
            hint="a service of the system needs root: sudo -E, or leave --system out",
        )
    replace_file(file, manager.text(unit))
    return file


def run_command(command: list[str], *, check: bool = True, timeout_s: float = _COMMAND_S) -> str:
    """Return the output of a manager's command. Raises ConfigError with its own words if it fails.

    Without ``check`` a command that fails has no output.
    """
    why = "there is no such command"
    if shutil.which(command[0]) is not None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            why = f"it took more than {timeout_s:g} s"
        else:
            if done.returncode == 0:
                return done.stdout
            why = (done.stderr.strip().splitlines() or ["no reason"])[0]
    if not check:
        return ""
    raise ConfigError(
        f"`{' '.join(command)}` failed: {why}",
        hint="does this machine run systemd or launchd? A container and some WSL2 set-ups run neither",
    )
