"""``convoy report``: facts for a bug report, in one file, without keys, prompts, answers or addresses."""

from __future__ import annotations

import getpass
import io
import json
import os
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.machine.managers import manager_here, run_command
from convoy.cli.machine.redaction import Redaction
from convoy.cli.operator.home import DEFAULT_HOME, DirectoryFlag, Home, host_name, local_addresses
from convoy.cli.running.endpoint import ApiKeyFlag, CaFlag, UrlFlag, client_key
from convoy.cli.running.process import running_processes
from convoy.cli.show.output import format_bytes, plain, print_note, print_table
from convoy.errors import ConfigError, ConvoyError
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint

if TYPE_CHECKING:
    from convoy.cluster.status import ClusterStatus
    from convoy.config.settings import Config

_LOG_LINES = 1000
_ENDPOINT_S = 10.0


def report(
    file: Annotated[
        Path | None, typer.Argument(help="The file to write.  [default: convoy-report-TIME.tar.gz]")
    ] = None,
    directory: DirectoryFlag = DEFAULT_HOME,
    url: UrlFlag = DEFAULT_URL,
    api_key_file: ApiKeyFlag = None,
    ca: CaFlag = None,
) -> None:
    """Write a file for a bug report, without keys, prompts or addresses."""
    home = Home(directory)
    settings = _settings(home)
    status = _status(Endpoint.of(url, client_key(api_key_file), ca, timeout_s=_ENDPOINT_S))
    # The head that answers, and other processes here, may be of another folder than ``directory``.
    running = running_processes()
    hidden = Redaction(
        _names_of(status)
        | {one.name: "(member)" for one in running if one.name != one.verb}
        | _private_words(settings)
    )
    print_note("checking this machine, as `convoy doctor` does ...")
    # These two hold numbers and fixed words alone.
    own = {"versions.json": _versions(), "config.json": {} if settings is None else _config(settings)}
    parts: dict[str, object] = {
        "doctor.json": _doctor(home),
        "status.json": {"error": status} if isinstance(status, str) else status,
        "processes.json": [{"verb": one.verb, "state": one.state} for one in running],
    }
    told = own | {name: hidden.value(plain(part)) for name, part in parts.items()}
    texts = {name: json.dumps(part, indent=2) + "\n" for name, part in told.items()}
    lines, left_out = hidden.log(service_log_lines())
    texts["log.txt"] = "".join(f"{line}\n" for line in lines)
    place = file or Path(time.strftime("convoy-report-%Y%m%d-%H%M%S.tar.gz"))
    _write(place, texts)
    print_table(
        ("part", "size", "lines"),
        [(name, format_bytes(len(text)), text.count("\n")) for name, text in texts.items()],
    )
    print(f"wrote {place}; {left_out} lines of logs were left out, because they may quote anything")
    print_note(f"read it before you send it: tar -xzOf {place}")


def _settings(home: Home) -> Config | None:
    try:
        return home.settings()
    except ConvoyError:
        # The doctor's findings name the fault.
        return None


def _private_words(settings: Config | None) -> dict[str, str]:
    """Return the names of this machine, its user and its cluster, each with its placeholder."""
    from convoy.sdk.options import load_member

    words = {host_name(): "(host)", os.uname().nodename: "(host)", getpass.getuser(): "(user)"}
    words |= {str(Path.home()): "(home)", str(Path.cwd()): "(folder)"}
    words |= dict.fromkeys(local_addresses(), "(address)")
    if settings is None:
        return words
    named = settings.model_name()
    if named is not None:
        words[named] = words[Path(named).name] = "(model)"
    try:
        roster = load_member(settings).roster
    except ConvoyError:
        return words | {settings.cluster.name or "": "(member)"}
    words[roster.cluster_id] = "(cluster)"
    for number, member in enumerate(roster.members, 1):
        words[member.name] = f"member-{number}"
        words[member.address[0]] = "(address)"
    return words


def _versions() -> dict[str, object]:
    from convoy.cluster.attestation.claims import own_claims
    from convoy.plan.memory.free import total_bytes

    claims = own_claims()
    return {
        "versions": claims.versions,
        "cores": os.cpu_count(),
        "memory_bytes": total_bytes(),
        "platform": os.uname().sysname,
        "machine": os.uname().machine,
    }


def _config(settings: Config) -> dict[str, object]:
    """Return every key that differs from its default. Free text, such as a path, is only said to be set."""
    from convoy.config.table import TABLES, rows

    found: dict[str, object] = {}
    for table in TABLES:
        for row in rows(table):
            value = getattr(getattr(settings, table, None), row.key, None)
            if value is None or value == row.default:
                continue
            is_number = isinstance(value, bool | int | float) and row.key != "port"
            is_open = is_number or bool(row.choices)
            found[f"{table} {row.key}"] = value if is_open else "(set)"
    return found


def _doctor(home: Home) -> object:
    from convoy.cli.doctor import findings_of

    path = home.config if home.config.exists() else None
    return [(name, finding.level, finding.what) for name, finding in findings_of(path)]


def _status(endpoint: Endpoint) -> ClusterStatus | str:
    """Return the status of the head, or the class of the error."""
    from convoy.sdk.client import cluster_status

    try:
        return cluster_status(endpoint)
    except ConvoyError as error:
        return type(error).__name__


def _names_of(status: ClusterStatus | str) -> dict[str, str]:
    """Return the names in a status, each with its placeholder."""
    if isinstance(status, str):
        return {}
    names = [*(stage.member for stage in status.stages), *(one.member for one in status.verdicts)]
    names += [*(one.name for one in status.standbys), *(one.name for one in status.idle)]
    names += [*(one.name for one in status.absent), *status.versions]
    members = {name: f"member-{number}" for number, name in enumerate(dict.fromkeys(names), 1)}
    return members | {status.model: "(model)", status.cluster: "(cluster)"}


def service_log_lines() -> list[str]:
    """Return the last lines of the logs of all services of this user."""
    manager = manager_here(system=False)
    logs = [run_command(manager.log(name, _LOG_LINES, follow=False), check=False) for name in manager.names()]
    return [line for log in logs for line in log.splitlines()]


def _write(place: Path, texts: dict[str, str]) -> None:
    """Write the parts as an archive that only this user can read. Raises ConfigError."""
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, text in texts.items():
                entry = tarfile.TarInfo(f"convoy-report/{name}")
                entry.size, entry.mtime = len(text.encode()), int(time.time())
                archive.addfile(entry, io.BytesIO(text.encode()))
    except OSError as error:
        raise ConfigError(
            f"cannot write {place}: {(error.strerror or 'unwritable').lower()}",
            hint="name another file: convoy report FILE",
        ) from None
