"""A whole cluster in one process: real heads, peers, handshakes and sealing, over any `Network`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.peer.event import PeerEvent
from convoy.cluster.peer.peer import Peer
from convoy.cluster.running import RunningCluster
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.network import MemoryNetwork
from convoy.transport.member import LocalMember
from convoy.transport.network import Network
from support.members import make_local_members, membership_of

NAMES = ("alpha", "beta", "gamma", "delta")
MEMBER = MemberOptions(num_threads=1, memory_bytes=1 << 32)


class PeerThread:
    """Run a peer on a thread of its own. ``events`` records its history."""

    def __init__(
        self,
        me: LocalMember,
        options: PeerOptions,
        network: Network,
        bind: tuple[str, int] | None = None,
    ) -> None:
        self.me = me
        self.events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self.membership = membership_of(me)
        self.peer = Peer(self.membership, options, self.events.put, network)
        bind = bind or me.member.address
        self._thread = threading.Thread(target=self.peer.run, args=(bind,), daemon=True)
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
    member: MemberOptions = MEMBER,
    **changes: Any,
) -> Iterator[RunningCluster]:
    """Bring a cluster up over memory, yield it, and take it down.

    ``changes`` are fields of `HeadOptions`. Every member uses the options ``member``.
    """
    network = MemoryNetwork()
    members = make_local_members(NAMES[:num_members])
    options = PeerOptions(member, model_path=source.path)
    peers = [PeerThread(me, options, network) for me in members[1:]]
    try:
        head_options = replace(HeadOptions(member, spans=spans, wait_s=60, num_blocks=256), **changes)
        cluster = RunningCluster.start(membership_of(members[0]), source, head_options, network=network)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        for peer in peers:
            peer.stop()
