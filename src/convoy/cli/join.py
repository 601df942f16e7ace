"""``convoy join``: be a peer, by an invitation or by a convoy.toml that is here already.

Waits for the head, holds the layers it plans, and waits again when it is gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.config import load_config, override
from convoy.cli.discovery import DiscoverFlag, network_of, with_discover
from convoy.cli.home import DEFAULT_HOME, DirectoryFlag, Home
from convoy.cli.member import load_member, peer_options, watched_roster
from convoy.cli.newcomer import Newcomer, Tell
from convoy.cli.output import JsonFlag, print_json_line, print_note
from convoy.cli.start import collector_at_rest
from convoy.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from convoy.cluster.peer import Peer, PeerEvent

    Show = Callable[[PeerEvent], None]

StandbyFlag = Annotated[bool, typer.Option("--standby", help="Hold layers only once another member is lost.")]
ModelFlag = Annotated[
    str | None,
    typer.Option(help="The model's directory here.  [default: the config's, or the head's files]"),
]
CacheFlag = Annotated[
    Path | None, typer.Option(help="Where to keep what the head sends.  [default: the user's cache]")
]
_LOOK_UP_S = 0.5


def join(
    token: Annotated[
        str | None,
        typer.Argument(help="An invitation from `convoy invite`; - reads it from standard input."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="This member's convoy.toml, where no invitation is used.")
    ] = None,
    model: ModelFlag = None,
    cache: CacheFlag = None,
    exit_with_head: Annotated[bool, typer.Option(help="End when the head goes.")] = False,
    standby: StandbyFlag = False,
    until_stdin_closes: Annotated[
        bool, typer.Option("--until-stdin-closes", help="End when standard input ends.")
    ] = False,
    directory: DirectoryFlag = DEFAULT_HOME,
    name: Annotated[str | None, typer.Option(help="With a token.  [default: the host's name]")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="With a token: HOST or HOST:PORT where others reach this machine."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="With a token: port to listen on.  [default: 7777]")
    ] = None,
    discover: DiscoverFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Hold layers for a head: one command on each further machine."""
    newcomer = Newcomer(Home(directory), name, address, port)
    settings = with_discover(load_config(_file(token, config, newcomer, _teller(as_json))), discover)
    settings = override(settings, model=override(settings.model, cache=cache))
    me = load_member(settings)
    with collector_at_rest(lambda text: _teller(as_json)("starting", text)):
        from convoy.cluster.peer import Peer  # the heavy rooms: what is wrong above is said without them

    options = peer_options(settings, model, exit_with_head=exit_with_head, standby=standby)
    port = me.member.address[1] if settings.listen.port is None else settings.listen.port
    with network_of(settings) as network, watched_roster(settings, me, quiet=as_json):
        peer = Peer(me, options, _shown(as_json=as_json, standby=standby), network)
        why = _run_until_asked(peer, (settings.listen.host, port), until_stdin_closes)
    _teller(as_json)("ended", f"{me.name}, {why}")


def _file(token: str | None, config: Path | None, newcomer: Newcomer, tell: Tell) -> Path:
    """The convoy.toml: that which was named, or that which an invitation brings."""
    if token is not None and config is None:
        return newcomer.join(token, tell)
    if token is None and config is not None:
        return config
    raise UsageError(
        "one of an invitation and --config is needed",
        hint="`convoy join -` and paste what `convoy invite` printed; later `convoy join --config FILE`",
    )


def _teller(as_json: bool) -> Tell:
    def tell(kind: str, text: str) -> None:
        if as_json:
            print_json_line({"kind": kind, "text": text})
        else:
            print_note(f"{kind}: {text}")

    return tell


def _shown(*, as_json: bool, standby: bool) -> Show:
    """What is said of events; a standby says what it is before anybody else comes."""
    show = _show_json if as_json else _show

    def shown(event: PeerEvent) -> None:
        show(event)
        if standby and event.kind == "listening":
            show(replace(event, kind="standby", text="has no stage until another member is lost"))

    return shown


def _show(event: PeerEvent) -> None:
    print_note(f"{event.kind}: {event.text}")


def _show_json(event: PeerEvent) -> None:
    print_json_line(event)


def _run_until_asked(peer: Peer, bind: tuple[str, int], until_stdin_closes: bool) -> str:
    """The peer runs on a thread of its own; this one waits for it, a signal or the end of standard input.

    Returns which it was.
    """
    # A signal handler may run in the middle of anything: SimpleQueue.put is made for that, locks are not.
    ends: queue.SimpleQueue[BaseException | str] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ends.put("as a signal asked"))

    def run() -> None:
        try:
            peer.run(bind)
        except BaseException as error:  # noqa: BLE001 - raised again on the main thread
            ends.put(error)
        else:
            ends.put("as its head is gone")

    def read_to_end() -> None:
        # Not `sys.stdin`, whose lock a process that ends by a signal could not take from this thread.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        ends.put("as standard input is over")

    running = threading.Thread(target=run, name="peer")
    running.start()
    if until_stdin_closes:
        threading.Thread(target=read_to_end, daemon=True).start()
    first = _first(ends)
    peer.stop()
    running.join()
    if isinstance(first, BaseException):
        raise first
    return first


def _first(ends: queue.SimpleQueue[BaseException | str]) -> BaseException | str:
    """What comes first. Looks up now and then: a signal just before a wait begins does not end it."""
    while True:
        with contextlib.suppress(queue.Empty):
            return ends.get(timeout=_LOOK_UP_S)
