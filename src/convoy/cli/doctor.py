"""``convoy doctor``: find the faults of this machine, this member and its links, and say how to fix them."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.checks.doctor_subject import DoctorSubject
from convoy.cli.operator.home import config_file
from convoy.cli.show.exit_codes import EXIT_FAILURE
from convoy.cli.show.output import JsonFlag, one_line, print_json, print_note, styled
from convoy.cli.show.progress import said_if_slow
from convoy.config.files import default_cache
from convoy.config.settings import Config
from convoy.sdk.endpoint import head_answers
from convoy.sdk.head import network_of

if TYPE_CHECKING:
    from convoy.cluster.checkup.finding import Check, Finding
    from convoy.transport.member import Member, Roster
    from convoy.transport.membership import Membership

_DIAL_WAIT_S = 5.0
_LOOK_UP_S = 4.0
_COLOURS = {"ok": "dim", "warn": "yellow", "fail": "red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(help="A member's convoy.toml.  [default: .convoy/convoy.toml, or the machine alone]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine, its keys, the roster and every peer. Exit 1 if a check fails."""
    from convoy.cluster.checkup.finding import examine

    told: list[tuple[str, Finding]] = []
    for check in _checks(config_file(config)):
        if check.wait is not None and not as_json:
            print_note(check.wait)
        with said_if_slow(f"checking {check.name} ...", quiet=as_json or check.wait is not None):
            found = examine(check)
        for finding in found:
            told.append((check.name, finding))
            if not as_json:
                _print(check.name, finding)
    counts = {level: sum(finding.level == level for _, finding in told) for level in _COLOURS}
    if as_json:
        rows = [
            {"check": name, "level": found.level, "what": found.what, "mend": found.mend}
            for name, found in told
        ]
        print_json({"healthy": not counts["fail"], "counts": counts, "findings": rows})
    else:
        print(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} to mend")
    if counts["fail"]:
        raise typer.Exit(EXIT_FAILURE)


def findings_of(path: Path | None) -> Iterator[tuple[str, Finding]]:
    """Yield each finding with the name of its check, as they come. Name a check that takes long."""
    from convoy.cluster.checkup.finding import examine

    for check in _checks(path):
        with said_if_slow(check.wait or f"checking {check.name} ..."):
            found = examine(check)
        for finding in found:
            yield check.name, finding


def _print(name: str, finding: Finding) -> None:
    level = styled(finding.level.ljust(4), _COLOURS[finding.level], sys.stdout)
    print(f"{level}  {name.ljust(9)}  {one_line(finding.what)}", flush=True)
    if finding.mend is not None:
        print(f"{' ' * 6}{'mend'.ljust(9)}  {one_line(finding.mend)}", flush=True)


def _checks(path: Path | None) -> Iterator[Check]:
    """Yield the checks in an order such that each needs only the results of those before it."""
    from convoy.cluster.checkup.finding import Check
    from convoy.cluster.checkup.machine import check_speed

    yield from _machine_checks()
    if path is None:
        yield Check("speed", partial(check_speed, folder=default_cache()), "measuring this machine ...")
        yield from _extra_checks(Config())
        return
    subject = DoctorSubject(path)
    yield Check("config", subject.read_config)
    if subject.config is None:
        return
    given = subject.config.model
    folder = given.cache or default_cache()
    own = partial(check_speed, given.wanted_kernel, given.num_threads, given.device, folder)
    yield Check("speed", own, "measuring this machine ...")
    yield from _extra_checks(subject.config)
    yield from _member_checks(subject, subject.config)
    yield from _network_checks(subject, subject.config)
    yield Check("model", subject.look_at_model, "reading the model's headers ...")


def _machine_checks() -> Iterator[Check]:
    from convoy.cluster.checkup import machine
    from convoy.cluster.checkup.apple import check_mac
    from convoy.cluster.checkup.finding import Check

    yield Check("python", machine.check_python)
    yield Check("packages", machine.check_packages)
    yield Check("exact", machine.check_exact, "computing a sample in exact mode ...")
    yield Check("ciphers", machine.check_ciphers)
    yield Check("memory", machine.check_memory)
    if sys.platform == "darwin":
        yield Check("mac", check_mac)
    yield Check("disk", lambda: machine.check_disk(Path.cwd()))
    yield Check("leaks", machine.check_leaks)


def _extra_checks(config: Config) -> Iterator[Check]:
    from convoy.cluster.checkup import machine
    from convoy.cluster.checkup.finding import Check

    yield Check("device", lambda: machine.check_devices(config.model.device, config.model.wanted_kernel))
    yield Check("discovery", lambda: machine.check_discovery(wanted=config.listen.discover))
    yield Check("tpm", lambda: machine.check_tpm(config.cluster.tpm))


def _member_checks(subject: DoctorSubject, config: Config) -> Iterator[Check]:
    from convoy.cluster.checkup import machine, member
    from convoy.cluster.checkup.finding import Check

    if config.model.memory_gb:
        yield Check("memory", lambda: machine.check_memory(int(config.model.memory_gb * 10**9)))
    yield Check("keys", lambda: member.check_keys(config.require_identity()))
    yield Check("roster", subject.read_roster)
    policy = config.cluster.policy
    if policy is not None:
        yield Check("policy", lambda: subject.read_policy(policy))
    roster, identity = subject.roster, subject.load_identity()
    if roster is None:
        return
    now = datetime.datetime.now(datetime.UTC)
    yield Check("clock", lambda: member.check_clock(roster, subject.files(), now))
    if identity is not None:
        yield Check("listed", lambda: member.check_listed(roster, config.require_name(), identity))
    yield Check("plan", lambda: member.check_granted(config.plan.layers, roster))


def _network_checks(subject: DoctorSubject, config: Config) -> Iterator[Check]:
    from convoy.cluster.checkup import network
    from convoy.cluster.checkup.finding import Check

    roster, me = subject.roster, subject.membership()
    if roster is None:
        return
    name = config.cluster.name or ""
    yield Check("address", lambda: _each_address(roster, name), "looking addresses up ...")
    yield Check("address", lambda: network.check_loopback(roster, name))
    yield Check("address", lambda: network.check_own_addresses(roster))
    if me is None:
        yield Check("peers", _not_dialled)
        return
    mine = network.at_address_of(roster, name)
    # Another member at this machine's address may rightly listen on the port.
    if not mine:
        yield Check("port", lambda: network.check_listen(me.current, config.listen.host, config.listen.port))
    if me.member.head:
        yield Check(
            "http",
            lambda: network.check_http(
                config.serve.host,
                config.serve.port,
                partial(head_answers, config.serve.host, config.serve.port),
            ),
        )
    others = [member for member in roster.members if member.name not in {name, *mine}]
    names = ", ".join(member.name for member in others)
    if others:
        dialling = f"dialling {names}, {_DIAL_WAIT_S:g} s at most ..."
        yield Check("peers", lambda: _each_peer(config, me, others), dialling)


def _not_dialled() -> Iterator[Finding]:
    from convoy.cluster.checkup.finding import warn

    yield warn(
        "no peer was dialled: keys and roster come first", "mend the failures above, and run this again"
    )


def _each_address(roster: Roster, name: str) -> list[Finding]:
    from convoy.cluster.checkup.finding import Finding, Look, at_once
    from convoy.cluster.checkup.network import check_address

    def look(member: Member) -> tuple[Look, Finding]:
        late = f"{member.address[0]} was not looked up within {_LOOK_UP_S:g} s"
        return lambda: check_address(member, mine=member.name == name), Finding("fail", late, "mend DNS")

    return at_once(_LOOK_UP_S, [look(member) for member in roster.members])


def _each_peer(config: Config, me: Membership, others: list[Member]) -> list[Finding]:
    from convoy.cluster.checkup.finding import Finding, Look, at_once
    from convoy.cluster.checkup.network import check_epochs, check_peer
    from convoy.transport.network import TcpNetwork

    def look(member: Member) -> tuple[Look, Finding]:
        late = f"{member.name} was not reached within {2 * _DIAL_WAIT_S:g} s"
        return (
            lambda: check_peer(member, lambda peer: network.dial(me, peer, _DIAL_WAIT_S)),
            Finding("fail", late, f"is {member.address[0]} looked up slowly?"),
        )

    # A peer may bring a newer roster while it is dialled.
    before = me.roster.epoch
    with network_of(config) as found:
        network = found or TcpNetwork()
        findings = at_once(2 * _DIAL_WAIT_S, [look(member) for member in others])
    return [*findings, *check_epochs(before, me.roster.epoch)]
