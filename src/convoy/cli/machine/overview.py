"""``convoy`` without arguments: the cluster and the processes of this machine, and the next commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from convoy import __version__
from convoy.cli.machine.managers import manager_here
from convoy.cli.operator.home import DEFAULT_HOME, Home
from convoy.cli.running.process import ProcessRecord, running_processes
from convoy.cli.show.output import counted, one_line, print_fields
from convoy.errors import ConvoyError
from convoy.sdk.endpoint import DEFAULT_URL

Steps = list[tuple[str, str]]
_ALL: Steps = [("convoy --help", "list every command")]
# The first words of the verbs that run a member. Coordinators, providers and proxies run beside one.
_MEMBER_VERBS = frozenset({"serve", "join", "run"})


@dataclass(frozen=True, slots=True)
class HomeMember:
    """Describe the member of the home folder. ``is_head`` is None if its files cannot be used."""

    text: str
    is_head: bool | None


def print_overview(directory: Path = DEFAULT_HOME) -> None:
    """Print the state of this machine in at most a screen."""
    print(f"Convoy {__version__}: one model across several machines, over links that are always sealed\n")
    member, running = _member(Home(directory)), running_processes()
    services = [f"{name} ({scope})" for scope, name in _services()]
    print_fields(
        [
            ("member", f"none in {directory.resolve()}" if member is None else member.text),
            *(("runs", f"{_label(one)} ({one.pid}): {one.state}") for one in running),
            *([] if running else [("runs", "nothing of this user")]),
            ("services", ", ".join(services) or "none"),
        ]
    )
    print("\nnext:")
    steps = _steps(member, running, has_service=bool(services)) + _ALL
    width = max(len(command) for command, _ in steps)
    for command, why in steps:
        print(f"  {command.ljust(width)}  {why}")


def _label(record: ProcessRecord) -> str:
    """Return the verb and the name of a process. A program that is no member has its verb as its name."""
    return " ".join(dict.fromkeys((record.verb, record.name)))


def _member(home: Home) -> HomeMember | None:
    if not home.config.exists():
        return None
    from convoy.cli.running.member import load_member
    from convoy.config.settings import load_config

    try:
        me = load_member(load_config(home.config))
    except ConvoyError as error:
        return HomeMember(f"in {home.directory.resolve()}, but {one_line(error.message)}", is_head=None)
    roster = me.roster
    role = "the head" if me.member.head else "a peer"
    return HomeMember(
        f"{me.name}, {role} of {roster.cluster_id} ({counted(len(roster.members), 'member')}, roster valid "
        f"until {roster.expires:%Y-%m-%d})",
        is_head=me.member.head,
    )


def _services() -> list[tuple[str, str]]:
    managers = [manager_here(system=False), manager_here(system=True)]
    return [(manager.scope, name) for manager in managers for name in manager.names()]


def _steps(member: HomeMember | None, running: list[ProcessRecord], *, has_service: bool) -> Steps:
    """Return the next commands of a person at this machine, each with its purpose."""
    served = next((one.head_url for one in running if one.head_url is not None), None)
    if served is not None:
        url = "" if served == DEFAULT_URL else f" --url {served}"
        return [
            (f"convoy chat{url}", "talk to the model"),
            (f"convoy open{url}", "sign a browser in to the page"),
            (f"convoy status{url}", "show stages, links and load"),
            ("convoy invite", "let one more machine in"),
        ]
    if any(one.verb.split()[0] in _MEMBER_VERBS for one in running):
        return [("convoy ps", "show the processes"), ("convoy stop", "end one, in order")]
    if member is None:
        return [
            ("convoy demo", "try a small model, split over two processes here"),
            ("convoy run MODEL", "serve a model on this machine alone"),
            ("convoy serve MODEL --invite", "make a cluster, and let a second machine in"),
            ("convoy join -", "join a cluster, with its invitation"),
        ]
    if member.is_head is None:
        return [("convoy doctor", "find the fault, and its mend")]
    start = ("convoy serve MODEL", "start the head") if member.is_head else ("convoy join", "start the peer")
    service = "convoy service install MODEL" if member.is_head else "convoy service install"
    return [
        start,
        *([] if has_service else [(service, "start it at each boot or login")]),
        ("convoy doctor", "check keys, roster, ports and peers"),
    ]
