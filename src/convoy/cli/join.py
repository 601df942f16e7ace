"""``convoy join``: be a peer.

Waits for the head, holds the layers it plans, and waits again when it is gone.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.config import load_config
from convoy.cli.member import load_member, peer_options
from convoy.cli.output import print_note

if TYPE_CHECKING:
    from convoy.cluster.peer import Peer, PeerEvent


def join(
    config: Annotated[Path, typer.Option(help="This member's convoy.toml.")],
    model: Annotated[
        str | None, typer.Option(help="The model's directory here.  [default: that in the config]")
    ] = None,
    exit_with_head: Annotated[bool, typer.Option(help="End when the head goes.")] = False,
    until_stdin_closes: Annotated[
        bool, typer.Option("--until-stdin-closes", help="End when standard input ends.")
    ] = False,
) -> None:
    """Hold layers for a head: one command on each further machine."""
    from convoy.cluster.peer import Peer

    settings = load_config(config)
    me = load_member(settings)
    peer = Peer(me, peer_options(settings, model, exit_with_head=exit_with_head), _show)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: peer.stop())
    if until_stdin_closes:
        threading.Thread(target=_stop_at_end, args=(peer,), daemon=True).start()
    peer.run((settings.listen.host, settings.listen.port))


def _show(event: PeerEvent) -> None:
    print_note(f"{event.kind}: {event.text}")


def _stop_at_end(peer: Peer) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    peer.stop()
