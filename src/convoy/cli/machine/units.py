"""Write the unit of a service: for systemd, or a property list for launchd.

Both restart a process that failed. Neither restarts one that was asked to end. systemd also leaves one
alone that has a fault which only a person can mend, and waits longer before each further restart.
"""

from __future__ import annotations

import plistlib
import sys
from dataclasses import dataclass
from pathlib import Path

from convoy.api.ending import END_S
from convoy.cli.show.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_USAGE
from convoy.errors import UsageError

UNIT_PREFIX = "convoy-"
LABEL_PREFIX = "org.convoy."
# The time for running answers, and then for the end itself.
_STOP_S = int(30 + 2 * END_S)
_RESTART_S = 2
_MAX_RESTART_S = 120
_LAUNCHD_RESTART_S = 30
# The first version of systemd with a growing wait between restarts.
_BACK_OFF_VERSION = 254
# Those of a system's service. The service of a user has no right to some of them.
_HARDENING = (
    "PrivateTmp=yes",
    "ProtectSystem=full",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectControlGroups=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
)


@dataclass(frozen=True, slots=True)
class ServiceUnit:
    """Hold the facts of one service. ``arguments`` follow ``python -P -m convoy``.

    ``folder`` is the working directory, so that relative paths in ``arguments`` hold. ``user`` runs a service
    of the system; None is a service of the present user.
    """

    name: str
    arguments: tuple[str, ...]
    folder: Path
    user: str | None = None

    @property
    def command(self) -> list[str]:
        """Return the command line with the Python of this process.

        Without -P, a ``queue.py`` in the folder would take the place of the library's module.
        """
        return [sys.executable, "-P", "-m", "convoy", *self.arguments]

    def systemd(self, version: int) -> bytes:
        """Return the unit file for systemd of ``version``. Raises `UsageError` for a line end in a word."""
        back_off = ("RestartSteps=8", f"RestartMaxDelaySec={_MAX_RESTART_S}")
        lines = [
            "[Unit]",
            f"Description=Convoy {self.arguments[0]} ({self.name})",
            "Wants=network-online.target",
            "After=network-online.target",
            # A machine may be without its network for days.
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=notify",
            f"ExecStart={' '.join(map(_quoted, self.command))}",
            f"WorkingDirectory={_escaped(str(self.folder))}",
            "Restart=on-failure",
            f"RestartSec={_RESTART_S}",
            *(back_off if version >= _BACK_OFF_VERSION else ()),
            f"RestartPreventExitStatus={EXIT_USAGE} {EXIT_CONFIG}",
            f"SuccessExitStatus={EXIT_INTERRUPTED}",
            # A model may be downloaded first, and a head waits for its peers.
            "TimeoutStartSec=infinity",
            f"TimeoutStopSec={_STOP_S}",
            "KillMode=mixed",
            # A dump of memory would hold prompts.
            "LimitCORE=0",
            "NoNewPrivileges=yes",
            *((f"User={self.user}", *_HARDENING) if self.user is not None else ()),
            "",
            "[Install]",
            f"WantedBy={'default.target' if self.user is None else 'multi-user.target'}",
        ]
        return ("\n".join(lines) + "\n").encode()

    def launchd(self, log: Path) -> bytes:
        """Return the property list for launchd, which writes the output to ``log``."""
        entry: dict[str, object] = {
            "Label": f"{LABEL_PREFIX}{self.name}",
            "ProgramArguments": self.command,
            "WorkingDirectory": str(self.folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _LAUNCHD_RESTART_S,
            "ExitTimeOut": _STOP_S,
            "HardResourceLimits": {"Core": 0},
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
        if self.user is not None:
            entry["UserName"] = self.user
        return plistlib.dumps(entry)


def _quoted(word: str) -> str:
    """Return a word of a command line as systemd reads it (systemd.service(5), Command lines)."""
    text = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return text if word and not set(word) & set(" \t'\";\\") else f'"{text}"'


def _escaped(text: str) -> str:
    """Return ``text`` without specifiers. Raises `UsageError` for one that would not stay on its line."""
    if not text.isprintable():
        raise UsageError(
            f"{text[:200]!a} cannot stand in the unit of a service: not all of it is printable",
            hint="rename the file or the folder, or leave the argument out",
        )
    return text.replace("%", "%%")
