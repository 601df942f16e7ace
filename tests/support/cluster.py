"""A whole cluster in one process: real heads, peers, handshakes and sealing, over a `MemoryNetwork`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.peer import Peer, PeerEvent
from convoy.cluster.running import RunningCluster
from convoy.crypto.identity import Identity
from convoy.model.source import ModelSource
from convoy.transport.member import LocalMember
from convoy.transport.network import MemoryNetwork, Network
from convoy.trust.card import member_of
from convoy.trust.roster import make_roster

NAMES = ("alpha", "beta", "gamma", "delta")


def make_members(num_members: int, first_port: int = 7101) -> list[LocalMember]:
    """The first is the head."""
    identities = {name: Identity.generate() for name in NAMES[:num_members]}
    members = [
        member_of(name, identity, ("127.0.0.1", first_port + index), head=index == 0)
        for index, (name, identity) in enumerate(identities.items())
    ]
    roster = make_roster("test-cluster", members)
    return [LocalMember(name, identity, roster) for name, identity in identities.items()]


class PeerThread:
    """A peer on a thread of its own; ``events`` tells what it went through."""

    def __init__(self, me: LocalMember, options: PeerOptions, network: Network) -> None:
        self.me = me
        self.events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self.peer = Peer(me, options, self.events.put, network)
        self._thread = threading.Thread(target=self.peer.run, args=(me.member.address,), daemon=True)
        self._thread.start()
        self.wait_for("listening")

    def wait_for(self, kind: str) -> PeerEvent:
        while (event := self.events.get(timeout=30)).kind != kind:
            pass
        return event

    def stop(self) -> None:
        self.peer.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def running_cluster(
    source: ModelSource,
    num_members: int,
    *,
    spans: Mapping[str, str] | None = None,
    network: Network | None = None,
    head_options: HeadOptions | None = None,
) -> Iterator[RunningCluster]:
    """Bring it up, hand it out, take it down."""
    network = network or MemoryNetwork()
    members = make_members(num_members)
    path = None if source.name in {"demo", "demo-mini"} else source.path
    peers = [PeerThread(me, PeerOptions(model_path=path), network) for me in members[1:]]
    try:
        options = head_options or HeadOptions(spans=spans, wait_s=10, num_blocks=256)
        cluster = RunningCluster.start(members[0], source, options, network=network)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        for peer in peers:
            peer.stop()
