"""Run ``convoy ps``, ``stop`` and ``logs``: the processes of this user here, and the logs of services."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from convoy.cli.machine.managers import ServiceManager, manager_here
from convoy.cli.operator.home import DEFAULT_HOME
from convoy.cli.running.process import ProcessRecord, running_processes
from convoy.cli.show.output import JsonFlag, print_json, print_note, print_table
from convoy.errors import ConfigError, Unavailable, UsageError

# A head gives its running answers 30 s, and ends within some seconds more.
_DEFAULT_WAIT_S = 50.0
_POLL_S = 0.05
_NO_PROCESS = "no process of Convoy runs here for this user; `convoy` says what to do next"


def ps(as_json: JsonFlag = False) -> None:
    """List the processes of Convoy on this machine."""
    records = running_processes()
    if as_json:
        print_json(records)
        return
    if not records:
        print_note(_NO_PROCESS)
        return
    print_table(
        ("pid", "verb", "name", "since", "state", "folder"),
        [(one.pid, one.verb, one.name, since_text(one), one.state, one.folder) for one in records],
    )


def since_text(record: ProcessRecord) -> str:
    """Return the local time at which a process started."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started_unix_s))


def stop(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A name of `convoy ps`, or a process id.  [default: the only one of this folder]"
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop every process that `convoy ps` lists.")] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds until a process must have ended.")
    ] = _DEFAULT_WAIT_S,
) -> None:
    """Stop a process of Convoy on this machine, in order.

    Without a name, only a process whose files are in this folder or in its .convoy is stopped. Heads,
    coordinators, providers and proxies finish their running answers first. A service stays stopped until the
    next boot or login.
    """
    if every and name is not None:
        raise UsageError(
            f"{name!r} and --all both say what to stop: give one", hint="--all stops what `convoy ps` lists"
        )
    records = running_processes()
    chosen = records if every else [_chosen(records, name)]
    if not chosen:
        print_note(_NO_PROCESS)
    for one in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGTERM)
    for one in chosen:
        _wait(one, wait_s)
        print_note(f"stopped {one.name} ({one.verb}, process {one.pid}, folder {one.folder})")


def _wait(record: ProcessRecord, wait_s: float) -> None:
    until_s = time.monotonic() + wait_s
    while _runs(record.pid):
        if time.monotonic() >= until_s:
            raise Unavailable(
                f"{record.name} (process {record.pid}) did not end within {wait_s:g} s",
                hint=f"wait longer with --wait, or end it at once: kill -9 {record.pid}",
            )
        time.sleep(_POLL_S)


def _runs(pid: int) -> bool:
    """Return whether a process runs. One that has ended keeps its id until its parent asks how."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _chosen(records: list[ProcessRecord], name: str | None) -> ProcessRecord:
    """Return the record of a name or an id; without one, the only record of this folder.

    Raises `UsageError`.
    """
    found = [one for one in records if (_is_here(one) if name is None else _is_named(one, name))]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(f"{one.name} ({one.pid}, folder {one.folder})" for one in records) or "none"
    where = "this folder has" if name is None else f"{name!r} names"
    asked = f"{where} {len(found)} processes, expected one:"
    raise UsageError(f"{asked} running are {shown}", hint="convoy stop NAME, convoy stop PID, or --all")


def _is_here(record: ProcessRecord) -> bool:
    """Return whether the files of a process are in this folder or below its .convoy."""
    folder = Path(record.folder)
    return folder == Path().resolve() or folder.is_relative_to(DEFAULT_HOME.resolve())


def _is_named(record: ProcessRecord, name: str) -> bool:
    return name in {record.name, str(record.pid)}


def logs(
    name: Annotated[str | None, typer.Argument(help="A service.  [default: the only one]")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines.")] = False,
) -> None:
    """Show the log of a service on this machine."""
    manager, service = _service(name)
    command = manager.log(service, lines, follow=follow)
    try:
        code = subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            f"there is no command {command[0]}", hint="it comes with the service manager"
        ) from None
    raise typer.Exit(code)


def _service(name: str | None) -> tuple[ServiceManager, str]:
    """Return an installed service with its manager; that of the user comes first. Raises `UsageError`."""
    managers = [manager_here(system=False), manager_here(system=True)]
    found = [(manager, one) for manager in managers for one in manager.names() if name in {None, one}]
    if found and (name is not None or len(found) == 1):
        return found[0]
    names = ", ".join(one for _, one in found) or "none"
    asked = "which service?" if name is None else f"no service {name}:"
    raise UsageError(
        f"{asked} installed are {names}",
        hint="`convoy service install` installs one; a process in a terminal logs to that terminal",
    )
