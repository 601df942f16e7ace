"""A network inside one process, for tests: handshakes and sealing are real, and sockets are not needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from convoy.errors import ConfigError, PeerUnreachable
from convoy.testing.links import settled_link_pair
from convoy.testing.streams import Fault
from convoy.transport.link.link import Link
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.transport.network import Listening, OnLink
from convoy.transport.options import LinkOptions


class MemoryNetwork:
    """Make links between the members of one process.

    ``records`` keeps, per (dialler, listener), the bytes that both ends hand to their streams.
    """

    def __init__(self, options: LinkOptions | None = None, *, record: bool = False) -> None:
        self._options = options
        self._record = record
        self._lock = threading.Lock()
        self._listening: dict[tuple[str, int], tuple[Membership, OnLink]] = {}
        self.records: dict[tuple[str, str], tuple[bytearray, bytearray]] = {}
        self.faults: dict[tuple[str, str], Iterable[Fault]] = {}

    def dial(self, me: Membership, peer: Member, timeout_s: float) -> Link:  # noqa: ARG002 - never waits
        with self._lock:
            there = self._listening.get(peer.address)
        if there is None:
            host, port = peer.address
            raise PeerUnreachable(
                f"{peer.name} at {host}:{port} could not be reached: no member listens there"
            )
        other, on_link = there
        pair = (me.name, peer.name)
        record = (bytearray(), bytearray()) if self._record else None
        if record is not None:
            self.records[pair] = record
        mine, others = settled_link_pair(
            me, other, faults=self.faults.get(pair, ()), record=record, options=self._options
        )
        other.attach(others)
        me.attach(mine)
        on_link(others)
        return mine

    def listen(self, me: Membership, bind: tuple[str, int], on_link: OnLink) -> Listening:
        with self._lock:
            if bind in self._listening:
                raise ConfigError(f"port {bind[1]} on {bind[0]} is taken")
            self._listening[bind] = (me, on_link)
        return _MemoryListening(self, bind)

    def forget(self, bind: tuple[str, int]) -> None:
        with self._lock:
            self._listening.pop(bind, None)


class _MemoryListening:
    def __init__(self, network: MemoryNetwork, address: tuple[str, int]) -> None:
        self._network = network
        self.address = address

    def close(self) -> None:
        self._network.forget(self.address)
