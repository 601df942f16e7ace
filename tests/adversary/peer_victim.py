"""A whole peer as a process, for attacks by members: `python -m adversary.peer_victim SETUP`.

As `adversary.victim`, but on standard output it says what it could not follow, by the error's name.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from adversary.victim import Crash, membership
from convoy.cluster.options import MemberOptions, PeerOptions
from convoy.cluster.peer.event import PeerEvent
from convoy.cluster.peer.peer import Peer
from convoy.errors import ConvoyError
from convoy.transport.link.link import Link, Received
from convoy.transport.network import TcpNetwork


class PeerVictim(Peer):
    """Run the product's peer. Its overrides only report."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._saying = threading.Lock()
        member = MemberOptions(num_threads=1, memory_bytes=1 << 30)
        network = TcpNetwork()
        super().__init__(
            membership(setup, Path(setup["directory"])), PeerOptions(member), self._event, network
        )

    def say(self, event: str, **rest: Any) -> None:
        with self._saying:
            print(json.dumps({"event": event, **rest}), flush=True)

    def _event(self, event: PeerEvent) -> None:
        if event.kind == "listening":
            self.say("listening", port=int(event.text.rpartition(":")[2]))

    def _failed(self, item: Received, error: ConvoyError) -> None:
        self.say("not followed", error=type(error).__name__, message=error.message)
        super()._failed(item, error)

    def link_ended(self, link: Link, error: ConvoyError) -> None:
        self.say("link ended", peer=link.peer, error=type(error).__name__, message=error.message)
        super().link_ended(link, error)

    def answer_orders(self) -> None:
        for line in sys.stdin:
            if json.loads(line)["do"] == "state":
                rss_bytes = psutil.Process().memory_info().rss
                self.say("state", rss_bytes=rss_bytes, threads=threading.active_count())


def main() -> None:
    setup = json.loads(sys.argv[1])
    victim = PeerVictim(setup)
    logging.getLogger("convoy").addHandler(Crash(victim.say))
    threading.Thread(target=victim.answer_orders, daemon=True).start()
    victim.run(("127.0.0.1", setup["port"]))


if __name__ == "__main__":
    main()
