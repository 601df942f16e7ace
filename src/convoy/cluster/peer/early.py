"""Listen before the peer's own code is loaded: a head that dials early is told what the peer still does.

It is apart from `peer` because it must import neither PyTorch nor a stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from convoy.errors import ConvoyError
from convoy.transport.link.link import Link
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.transport.network import Listening, Network, OnLink, TcpNetwork
from convoy.wire.messages.control import Progress, StartPhase

# A start that takes no longer needs no word.
_TICK_S = 1.0


class EarlyListener:
    """Listen from construction on, and keep each link until `listen` names its taker. It is a `Network`.

    Every ``tick_s``, heads among the kept links get a PROGRESS with the present phase and the seconds that it
    has lasted. Only a member of the roster has a link: strangers get nothing. ``on_slow`` is told once of
    each phase that lasts so long.
    """

    def __init__(
        self,
        network: Network,
        me: Membership,
        bind: tuple[str, int],
        on_slow: Callable[[StartPhase], None] = lambda _phase: None,
        *,
        tick_s: float = _TICK_S,
    ) -> None:
        self._network = network
        self._place = me.current.name, bind
        self._on_slow = on_slow
        self._tick_s = tick_s
        self._lock = threading.Lock()
        self._take: OnLink | None = None
        self._kept: list[Link] = []
        self._phase: StartPhase = "import"
        self._num_ticks = 0
        self._over = threading.Event()
        self._listening = network.listen(me, bind, self._keep)
        self._ticker = threading.Thread(target=self._tick, name="start", daemon=True)
        self._ticker.start()

    def enter(self, phase: StartPhase) -> None:
        """Begin the next phase of the start."""
        with self._lock:
            self._phase, self._num_ticks = phase, 0

    def dial(self, me: Membership, peer: Member, timeout_s: float) -> Link:
        return self._network.dial(me, peer, timeout_s)

    def listen(self, me: Membership, bind: tuple[str, int], on_link: OnLink) -> Listening:
        """Hand the kept links and all later ones to ``on_link``, and return the listener that runs."""
        assert (me.current.name, bind) == self._place, "another listener than the one that runs"
        self._over.set()
        # No PROGRESS may follow what the taker sends.
        with self._lock:
            self._take, kept = on_link, self._kept
            self._kept = []
        for link in kept:
            on_link(link)
        return self._listening

    def close(self) -> None:
        """Stop listening, and end the links that were handed to nobody."""
        self._over.set()
        self._listening.close()
        with self._lock:
            kept, self._kept = self._kept, []
        for link in kept:
            link.close("the peer is shutting down")

    def _keep(self, link: Link) -> None:
        with self._lock:
            take = self._take
            if take is None:
                self._kept.append(link)
        if take is not None:
            take(link)

    def _tick(self) -> None:
        while not self._over.wait(self._tick_s):
            with self._lock:
                if self._over.is_set():
                    return
                self._num_ticks += 1
                is_first, phase = self._num_ticks == 1, self._phase
                progress = Progress(0, int(self._num_ticks * self._tick_s), 0, phase)
                for link in self._kept:
                    if link.facts.member.head:
                        # The taker learns of a link that has ended.
                        with contextlib.suppress(ConvoyError):
                            link.send(progress)
            if is_first:
                self._on_slow(phase)


@contextmanager
def early_listener(
    network: Network | None, me: Membership, bind: tuple[str, int], on_slow: Callable[[StartPhase], None]
) -> Iterator[EarlyListener]:
    """Yield a listener that is closed when the block ends. Without ``network`` it is on TCP."""
    listener = EarlyListener(network or TcpNetwork(), me, bind, on_slow)
    try:
        yield listener
    finally:
        listener.close()
