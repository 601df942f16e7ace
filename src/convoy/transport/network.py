"""The way in which members reach each other: TLS over TCP, behind a Protocol.

A head and its peers take a `Network`. So a whole cluster, handshakes and sealing included, can run inside
one test process over `convoy.testing.MemoryNetwork`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from convoy.errors import HandshakeLate, PeerBusy, PeerError
from convoy.transport.dial import Wrap, dial
from convoy.transport.link.link import Link
from convoy.transport.listen.listener import Listener
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.transport.options import LinkOptions

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
        """Return a link to ``peer``, and try a full or late listener again until ``timeout_s`` is over.

        Raises the errors of `dial.dial`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._dial_any(me, peer, deadline_s)
            except (PeerBusy, HandshakeLate):
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
