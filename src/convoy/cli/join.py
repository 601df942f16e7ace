"""``convoy join``: run a peer, from an invitation or from a convoy.toml that is here already.

The peer waits for the head and holds the layers that the head assigns. It waits again when the head goes.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.api.ending import on_signals
from convoy.cli.flags.device import DeviceFlag, computing
from convoy.cli.flags.discovery import DiscoverFlag, with_discover
from convoy.cli.flags.metrics import MetricsFlag, MetricsKeyFlag, serving_metrics
from convoy.cli.flags.table import option
from convoy.cli.operator.home import DEFAULT_HOME, DirectoryFlag, Home, config_file
from convoy.cli.operator.newcomer import NewcomerFiles, Tell
from convoy.cli.running.hub import SignedFlag, WeightsFromFlag, weights_from
from convoy.cli.running.member import load_member, watched_roster
from convoy.cli.running.process import AnnouncedProcess, announced
from convoy.cli.show.output import JsonFlag, VerboseFlag, print_json_line, print_note
from convoy.cluster.peer.early import early_listener
from convoy.config.settings import Config, load_config, override
from convoy.errors import UsageError
from convoy.model.library import heavy_rooms
from convoy.sdk.head import network_of, only_process
from convoy.sdk.options import peer_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from convoy.cluster.metrics.families import Metric
    from convoy.cluster.options import PeerOptions
    from convoy.cluster.peer.event import PeerEvent
    from convoy.cluster.peer.peer import Peer
    from convoy.transport.membership import Membership
    from convoy.wire.messages.control import StartPhase

    Show = Callable[[PeerEvent], None]

StandbyFlag = Annotated[bool | None, option("cluster", "standby")]
TokenArgument = Annotated[
    str | None,
    typer.Argument(help="An invitation from `convoy invite`; - reads it from standard input."),
]
AddressFlag = Annotated[
    str | None,
    typer.Option(help="With a token: HOST or HOST:PORT where others reach this machine."),
]
NameFlag = Annotated[
    str | None, typer.Option(help="With a token: this member's name.  [default: the host's]")
]
ModelFlag = Annotated[
    str | None,
    typer.Option(help="The model's directory here.  [default: the config's, or the head's files]"),
]
CacheFlag = Annotated[Path | None, option("model", "cache")]
StdinFlag = Annotated[bool, typer.Option("--until-stdin-closes", help="End when standard input ends.")]
PortFlag = Annotated[int | None, option("listen", "port")]
# Kinds of events that only --verbose shows: "ready" names the layers afterwards.
_STEPS = frozenset({"loading", "active"})


def join(
    token: TokenArgument = None,
    config: Annotated[
        Path | None, typer.Option(help="This member's convoy.toml.  [default: that in --dir]")
    ] = None,
    model: ModelFlag = None,
    cache: CacheFlag = None,
    weights: WeightsFromFlag = None,
    signed: SignedFlag = None,
    exit_with_head: Annotated[bool, typer.Option(help="End when the head goes.")] = False,
    standby: StandbyFlag = None,
    until_stdin_closes: StdinFlag = False,
    directory: DirectoryFlag = DEFAULT_HOME,
    name: NameFlag = None,
    address: AddressFlag = None,
    port: PortFlag = None,
    device: DeviceFlag = None,
    discover: DiscoverFlag = None,
    metrics: MetricsFlag = None,
    metrics_key_file: MetricsKeyFlag = None,
    verbose: VerboseFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Hold layers for a head: run it on each further machine."""
    newcomer = NewcomerFiles(Home(directory), name, address, port, standby)
    file = _file(token, config, newcomer, _teller(as_json))
    settings = _with_flags(with_discover(load_config(file), discover), standby, port)
    asked = override(settings.model, cache=cache, weights_from=weights_from(weights), signed=signed)
    settings = computing(override(settings, model=asked), None, None, device)
    me = load_member(settings)
    _check_peer(me)
    tell, bind = _teller(as_json), _bind(settings, me)
    if token is None:
        # With a token, the enrolment has used these flags already.
        _check_asked(newcomer, file, me, tell)
    with (
        only_process(settings),
        network_of(settings) as network,
        watched_roster(settings, me, quiet=as_json),
        announced("join", me.name, file.parent, listed=not until_stdin_closes) as here,
        early_listener(network, me, bind, partial(_say_slow, tell)) as early,
    ):
        with heavy_rooms(lambda text: tell("starting", text)):
            # This import loads the heavy packages, so the errors above come without the wait.
            from convoy.cluster.peer.peer import Peer
        options = _checked(peer_options(settings, model, exit_with_head=exit_with_head))
        early.enter("examine")
        peer = Peer(me, options, _shown(as_json, verbose, settings.cluster.standby, here), early)
        with serving_metrics(metrics, metrics_key_file, partial(_families, peer), tell):
            why = _run_until_asked(peer, bind, until_stdin_closes)
    tell("ended", f"{me.name}, {why}")


def _say_slow(tell: Tell, phase: StartPhase) -> None:
    """Say that this machine examines itself. The import was said when it began."""
    if phase == "examine":
        tell("starting", "examining this machine's kernels ...")


def _check_peer(me: Membership) -> None:
    """Raise `UsageError` for the roster's only head: no other member could ever dial it."""
    if me.member.head and sum(member.head for member in me.roster.members) == 1:
        raise UsageError(f"{me.name} is the head of this cluster", hint="`convoy serve MODEL` starts it")


def _checked(options: PeerOptions) -> PeerOptions:
    """Return ``options``. Raises the errors of their model before a head asks for it."""
    from convoy.model.checkpoints.source import ModelSource

    if options.model_path is not None:
        ModelSource.resolve(str(options.model_path))
    return options


def _bind(settings: Config, me: Membership) -> tuple[str, int]:
    port = me.member.address[1] if settings.listen.port is None else settings.listen.port
    return settings.listen.host, port


def _families(peer: Peer) -> Iterable[Metric]:
    from convoy.cluster.metrics.member import peer_families

    return peer_families(peer)


def _file(token: str | None, config: Path | None, newcomer: NewcomerFiles, tell: Tell) -> Path:
    """Return the convoy.toml: from an invitation, as named, or in the home folder. Raises `UsageError`."""
    file = config_file(config, newcomer.home.directory)
    if token is not None and config is None:
        return newcomer.join(token, tell)
    if token is None and file is not None:
        return file
    here = "" if file is not None else f"no member in {newcomer.home.directory.resolve()}: "
    raise UsageError(
        f"{here}an invitation or --config is needed",
        hint="run `convoy join -` and paste the token of `convoy serve MODEL --invite` or `convoy invite`; "
        "later run `convoy join` in the same folder, or name it with --dir",
    )


def _with_flags(settings: Config, standby: bool | None, port: int | None) -> Config:
    cluster = override(settings.cluster, standby=standby)
    return override(settings, cluster=cluster, listen=override(settings.listen, port=port))


def _check_asked(asked: NewcomerFiles, file: Path, me: Membership, tell: Tell) -> None:
    """Check the flags of an invitation when none was given. Each flag is obeyed or refused, never ignored.

    Raises `UsageError`.
    """
    from convoy.trust.roster.roster import format_address

    listed = format_address(me.member.address)
    if asked.name not in {None, me.name}:
        raise UsageError(f"--name is {asked.name}, and {file} is {me.name}'s", hint="leave --name out")
    if asked.address is not None:
        raise UsageError(
            f"--address is {asked.address}, and the roster sends the others to {listed}",
            hint="an address is changed by another invitation: `convoy invite` on the first machine, then "
            "`convoy join -` here",
        )
    if asked.port not in {None, me.member.address[1]}:
        tell(
            "note",
            f"{me.name} listens on port {asked.port}, and the roster sends the others to {listed}: it must "
            f"lead here",
        )


def _teller(as_json: bool) -> Tell:
    def tell(kind: str, text: str) -> None:
        if as_json:
            print_json_line({"kind": kind, "text": text})
        else:
            print_note(f"{kind}: {text}")

    return tell


def _shown(as_json: bool, verbose: bool, standby: bool, here: AnnouncedProcess) -> Show:
    """Return a function that prints and announces events.

    A standby describes itself before another member connects.
    """
    show = _show_json if as_json else _show if verbose else _show_main

    def shown(event: PeerEvent) -> None:
        show(event)
        # A peer is ready once it waits for its head, which may come days later.
        (here.ready if event.kind == "listening" else here.say)(f"{event.kind}: {event.text}")
        if standby and event.kind == "listening":
            show(replace(event, kind="standby", text="has no stage until another member is lost"))

    return shown


def _show(event: PeerEvent) -> None:
    print_note(f"{event.kind}: {event.text}")


def _show_main(event: PeerEvent) -> None:
    """Print an event, unless it is a step between others."""
    if event.kind not in _STEPS:
        _show(event)


def _show_json(event: PeerEvent) -> None:
    print_json_line(event)


def _run_until_asked(peer: Peer, bind: tuple[str, int], until_stdin_closes: bool) -> str:
    """Run the peer on a thread until the peer ends, a signal comes, or standard input ends.

    Returns the cause as text. Raises the peer's error.
    """
    # A signal handler may interrupt any code. SimpleQueue.put allows that, and a lock does not.
    ends: queue.SimpleQueue[BaseException | str] = queue.SimpleQueue()
    on_signals(lambda: ends.put("as a signal asked"))

    def run() -> None:
        try:
            peer.run(bind)
        # The main thread raises it again.
        except BaseException as error:  # noqa: BLE001
            ends.put(error)
        else:
            ends.put("as its head is gone")

    def read_to_end() -> None:
        # Read the descriptor: a process that ends by a signal could not take the lock of `sys.stdin` from
        # this thread.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        ends.put("as standard input is over")

    running = threading.Thread(target=run, name="peer")
    running.start()
    if until_stdin_closes:
        threading.Thread(target=read_to_end, daemon=True).start()
    first = ends.get()
    # Wait for the peer's thread, so that its links are closed before the command ends.
    peer.stop()
    running.join()
    if isinstance(first, BaseException):
        raise first
    return first
