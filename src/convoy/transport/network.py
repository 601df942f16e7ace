"""The ways members reach each other: real sockets, or one process in which every other part is real.

A head and its peers take a `Network`. So a whole cluster, handshakes and sealing included, can run inside
one test process, with faults between any two members.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from convoy.errors import ConfigError, PeerBusy, PeerError, PeerUnreachable
from convoy.transport.dial import Wrap, dial
from convoy.transport.link.link import Link
from convoy.transport.listen.listener import Listener
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.transport.memory_link import settled_link_pair
from convoy.transport.options import LinkOptions
from convoy.transport.streams.memory import Fault

OnLink = Callable[[Link], None]
_RETRY_S = 0.1
Find = Callable[[str], Iterable[tuple[str, int]]]


class Listening(Protocol):
    """Describe a listener that hands new links to its `OnLink` until it is closed."""

    @property
    def address(self) -> tuple[str, int]: ...

    def close(self) -> None: ...


class Network(Protocol):
    """Make links to and from other members. The links are not started yet."""

    def dial(self, me: Membership, peer: Member, timeout_s: float) -> Link:
        """Return a link to ``peer``. Raises the errors of `transport.dial.dial`."""

    def listen(self, me: Membership, bind: tuple[str, int], on_link: OnLink) -> Listening:
        """Listen for links on ``bind``. Raises `ConfigError` if the address is taken."""


class TcpNetwork:
    """Make links with TLS over TCP: the only network of the product. ``wrap``: see `transport.dial.dial`.

    ``find`` gives further addresses of a member, to be tried after the roster's. Such an address proves
    nothing: the member that answers there proves itself as everywhere else.
    """

    def __init__(
        self, options: LinkOptions | None = None, wrap: Wrap | None = None, find: Find | None = None
    ) -> None:
        # All links share this one value, and with it one memory budget.
        self._options = options or LinkOptions()
        self._wrap = wrap
        self._find = find or (lambda _name: ())

    def dial(self, me: Membership, peer: Member, timeout_s: float) -> Link:
        """Return a link to ``peer``, and try a full listener again until ``timeout_s`` is over.

        Raises the errors of `dial.dial`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._dial_any(me, peer, deadline_s)
            except PeerBusy:
                if time.monotonic() + _RETRY_S >= deadline_s:
                    raise
                time.sleep(_RETRY_S)

    def _dial_any(self, me: Membership, peer: Member, deadline_s: float) -> Link:
        """Try the roster's address, then those of ``find``; they share the remaining time.

        Raises the error of the roster's address: an announced address comes from somebody else and must
        not decide which error the caller sees.
        """
        found = [address for address in self._find(peer.name) if address != peer.address]
        failed: PeerError | None = None
        for index, address in enumerate([peer.address, *found]):
            share_s = max(0.001, (deadline_s - time.monotonic()) / (1 + len(found) - index))
            try:
                return dial(
                    address,
                    me=me,
                    peer_name=peer.name,
                    timeout_s=share_s,
                    options=self._options,
                    wrap=self._wrap,
                )
            except PeerError as error:
                failed = failed or error
        assert failed is not None
        raise failed

    def listen(self, me: Membership, bind: tuple[str, int], on_link: OnLink) -> Listening:
        return Listener(bind, me, on_link, options=self._options, wrap=self._wrap)


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
