"""``convoy service``: run a head or a peer as a service of systemd or launchd, which survives a reboot."""

from __future__ import annotations

import getpass
import os
import pwd
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.machine.managers import ServiceManager, manager_here, run_command, write_unit
from convoy.cli.machine.units import ServiceUnit
from convoy.cli.operator.home import DEFAULT_HOME, DirectoryFlag, Home
from convoy.cli.show.output import JsonFlag, print_json, print_note, print_table
from convoy.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from convoy.config.settings import Config

app = typer.Typer(help="Run a member as a service that survives a reboot.", rich_markup_mode=None)

SystemFlag = Annotated[bool, typer.Option("--system", help="A service of the system, not of this user.")]
NameArgument = Annotated[str | None, typer.Argument(help="Its name.  [default: the only one]")]
# The name of a head without a cluster.
_ALONE = "alone"
_LINGER = Path("/var/lib/systemd/linger")


@app.command()
def install(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="The arguments of `serve` or `join`: MODEL, and options behind --."),
    ] = None,
    directory: DirectoryFlag = DEFAULT_HOME,
    system: SystemFlag = False,
    shown: Annotated[bool, typer.Option("--print", help="Show the unit; change nothing.")] = False,
) -> None:
    """Install and start this member as a service.

    The service runs `serve` for the head, and `join` for a peer.
    """
    unit = _unit(directory, tuple(arguments or ()), system=system)
    manager = manager_here(system=system)
    if shown:
        sys.stdout.write(manager.text(unit).decode())
        return
    file = write_unit(manager, unit)
    print_note(f"wrote {file}")
    for command in manager.start(unit.name):
        print_note(f"run: {' '.join(command)}")
        run_command(command)
    print_note(f"installed {unit.name}: `convoy service status` shows it, `convoy logs {unit.name}` its log")
    _print_linger(system=system)


@app.command()
def status(as_json: JsonFlag = False) -> None:
    """Show the installed services and their states."""
    states = [manager.state(name) for manager in _managers() for name in manager.names()]
    if as_json:
        print_json(states)
        return
    if not states:
        print_note("no service of Convoy is installed; `convoy service install` installs one")
        return
    print_table(
        ("service", "scope", "state", "restarts", "says"),
        [(one.name, one.scope, one.state, one.restarts, one.text or None) for one in states],
    )


@app.command()
def uninstall(name: NameArgument = None, system: SystemFlag = False) -> None:
    """Stop a service and remove its unit.

    Keys, roster and models stay.
    """
    manager = manager_here(system=system)
    chosen = _chosen(manager, name)
    try:
        for command in manager.end(chosen):
            print_note(f"run: {' '.join(command)}")
            run_command(command)
    except ConfigError as error:
        # The unit goes even if its manager does not run.
        print_note(f"warning: {error.message}")
    try:
        manager.file(chosen).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot remove {manager.file(chosen)}: {(error.strerror or '').lower()}") from None
    print_note(f"removed {manager.file(chosen)}")


def _managers() -> list[ServiceManager]:
    return [manager_here(system=False), manager_here(system=True)]


def _chosen(manager: ServiceManager, name: str | None) -> str:
    """Return ``name``, or the name of the only service. Raises `UsageError`."""
    names = manager.names()
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return name
    found = f"installed are {', '.join(names)}" if names else "none is installed"
    raise UsageError(
        f"no service {name}: {found}" if name is not None else f"which service? {found}",
        hint="`convoy service status` lists those of this user and of the system",
    )


def _unit(directory: Path, given: tuple[str, ...], *, system: bool) -> ServiceUnit:
    """Return the unit of the member in ``directory``; without one, of a head alone. Raises `UsageError`."""
    home = Home(directory)
    settings = home.settings()
    verb, name = ("serve", _ALONE) if settings is None else _role(settings)
    _check_arguments(verb, given, settings)
    folder = Path.cwd()
    arguments = (verb, *given, *(() if settings is None else ("--dir", str(directory.resolve()))))
    owner = pwd.getpwuid(os.stat(directory if settings is not None else folder).st_uid).pw_name
    return ServiceUnit(name, arguments, folder, owner if system else None)


def _role(settings: Config) -> tuple[str, str]:
    """Return the verb of this member, and its name."""
    from convoy.cli.running.member import load_member

    me = load_member(settings)
    return ("serve" if me.member.head else "join"), me.name


def _check_arguments(verb: str, given: tuple[str, ...], settings: Config | None) -> None:
    """Refuse arguments now that would stop the service at each boot. Raises `UsageError`."""
    from convoy.cli.verbs import VERBS

    command = next(row for row in VERBS if row.name == verb).load()
    parsed = command.make_context(verb, list(given)).params
    if parsed.get("invite") or parsed.get("token") is not None:
        raise UsageError(
            "a service takes no invitation: it works once, and a service starts many times",
            hint="run `convoy serve --invite` or `convoy join -` first, and then install the service",
        )
    if verb == "serve" and parsed["model"] is None and (settings is None or settings.model_name() is None):
        raise UsageError(
            "no model was named for the head",
            hint="convoy service install MODEL; a peer joins first: `convoy join -`",
        )


def _print_linger(*, system: bool) -> None:
    """Name the command that lets a user's services run without a login. It needs an administrator."""
    user = getpass.getuser()
    if system or sys.platform == "darwin" or (_LINGER / user).exists():
        return
    print_note(
        f"it runs while {user} is logged in; to start it at boot, and to keep it after a logout: "
        f"loginctl enable-linger {user}"
    )
