"""Announce a process that runs for long: to `convoy ps`, and to systemd when it is ready.

A record is a folder that its process keeps locked, so that no dead process is listed. It holds no secret and
no text of a request.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from convoy.cli.show.output import one_line
from convoy.config.files import default_cache, replace_file
from convoy.config.temporary_folder import LOCK_NAME, remove_dead_folders, temporary_folder
from convoy.errors import ConvoyError

# systemd names its socket here (sd_notify(3)).
_NOTIFY_VARIABLE = "NOTIFY_SOCKET"
_RECORD = "process.json"
_CAFFEINATE = "/usr/bin/caffeinate"
_MAX_RECORD_BYTES = 1 << 16
_MAX_STATE_CHARS = 500
# How far the two clocks of a process's start may be apart.
_CLOCK_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Describe a process: its verb, its member's name, its folder, and its present work as text.

    ``url`` is the HTTP address of a head or coordinator that serves.
    """

    pid: int
    verb: str
    name: str
    folder: str
    host: str
    started_unix_s: float
    state: str = "starting"
    url: str | None = None

    @property
    def head_url(self) -> str | None:
        """Return the HTTP address of a head that serves."""
        return None if self.verb == "coordinator" else self.url


class AnnouncedProcess:
    """Keep the record of this process, and tell systemd of its state."""

    def __init__(self, record: ProcessRecord, folder: Path | None, notify_socket: str | None) -> None:
        self._record = record
        self._folder = folder
        self._socket = notify_socket
        self._write()

    @property
    def url(self) -> str | None:
        """Return the HTTP address of a head that serves."""
        return self._record.url

    def say(self, state: str) -> None:
        """Change the text of the state."""
        self._change(state, self._record.url)

    def ready(self, state: str, url: str | None = None) -> None:
        """Announce that the process serves now. systemd then counts its unit as started."""
        self._change(state, url, "READY=1")

    def end(self) -> None:
        """Announce that the process is about to end."""
        self._change("ending", self._record.url, "STOPPING=1")

    def _change(self, state: str, url: str | None, *words: str) -> None:
        # It may quote another member, and a line of its own would be a command to systemd.
        state = one_line(state[:_MAX_STATE_CHARS])
        self._record = replace(self._record, state=state, url=url)
        self._write()
        _notify(self._socket, *words, f"STATUS={state}")

    def _write(self) -> None:
        if self._folder is not None:
            # A full disk must not end a server.
            with contextlib.suppress(ConvoyError):
                replace_file(self._folder / _RECORD, json.dumps(asdict(self._record)).encode())


@contextlib.contextmanager
def announced(verb: str, name: str, folder: Path, *, listed: bool = True) -> Iterator[AnnouncedProcess]:
    """Announce this process while the block runs. ``folder`` is the one of the member's files.

    A process that another command started and ends is not ``listed``.

    Children do not inherit the socket of systemd: they would announce themselves in place of this process.
    """
    now = time.time()
    record = ProcessRecord(os.getpid(), verb, name, str(folder.resolve()), platform.node(), now)
    notify_socket = os.environ.pop(_NOTIFY_VARIABLE, None)
    with contextlib.ExitStack() as stack:
        place: Path | None = None
        # Without a cache that can be written, the process is missing from `convoy ps`, and nothing else.
        with contextlib.suppress(OSError):
            if listed:
                _parent().mkdir(mode=0o700, parents=True, exist_ok=True)
                place = stack.enter_context(temporary_folder(_parent()))
        keep_awake(record.pid)
        process = AnnouncedProcess(record, place, notify_socket)
        stack.callback(process.end)
        yield process


def keep_awake(
    pid: int,
    system: str = sys.platform,
    start: Callable[[Sequence[str]], object] = subprocess.Popen,
) -> None:
    """Keep a Mac from idle sleep as long as the process ``pid`` runs. A closed lid still ends its links."""
    if system == "darwin":
        # It ends by itself with the process that it waits for.
        with contextlib.suppress(OSError):
            start((_CAFFEINATE, "-i", "-w", str(pid)))


def running_processes() -> list[ProcessRecord]:
    """Return the processes of this user on this machine, the oldest first."""
    remove_dead_folders(_parent(), os.geteuid())
    found = []
    for file in _parent().glob(f"*/{_RECORD}"):
        # A process may end, and remove its file, at any time.
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = ProcessRecord(**json.loads(file.read_bytes()[:_MAX_RECORD_BYTES]))
            # A home folder may be shared with other machines.
            if record.host == platform.node() and _is_its_process(record, file.parent):
                found.append(record)
    return sorted(found, key=lambda one: one.started_unix_s)


def serves_here(url: str) -> bool:
    """Return whether a running process of this user recorded that it serves at ``url``."""
    return any(record.url == url for record in running_processes())


def _is_its_process(record: ProcessRecord, folder: Path) -> bool:
    """Return whether the process of ``record`` runs. Another one may have the id of a dead one.

    A lock that is left in ``folder`` proves it. A file system without locks keeps the records of the dead,
    and there the process must be as old as its record: `convoy stop` sends a signal.
    """
    # Coordinators and proxies announce themselves, and read no records.
    import psutil

    if (folder / LOCK_NAME).exists():
        return bool(psutil.pid_exists(record.pid))
    try:
        return bool(psutil.Process(record.pid).create_time() <= record.started_unix_s + _CLOCK_S)
    except psutil.Error:
        return False


def _parent() -> Path:
    return default_cache() / "running"


def _notify(address: str | None, *lines: str) -> None:
    """Send ``lines`` to the socket of systemd, or nowhere for None."""
    if not address:
        return
    # An address with @ is an abstract one: it has no file.
    place = f"\0{address[1:]}" if address.startswith("@") else address
    # A manager that has gone is no reason to end.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(place)
        sock.sendall("\n".join(lines).encode())
