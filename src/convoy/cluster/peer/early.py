"""Listen before the peer's own code is loaded: a head that dials early is told what the peer still does.

It is apart from `peer` because it must import neither PyTorch nor a stage.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from convoy.errors import ConvoyError
from convoy.transport.link.link import Link
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.transport.network import Listening, Network, OnLink, TcpNetwork
from convoy.wire.messages.control import Progress, StartPhase

_log = logging.getLogger(__name__)
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
        # The link to which a PROGRESS is under way, and whether a thread hands links over.
        self._told: Link | None = None
        self._is_handing = False
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
        """Hand the kept links and all later ones to ``on_link``, and return the listener that runs.

        They come in their order. A link to which a PROGRESS is under way comes after that: a head that reads
        nothing holds up nothing but its own links.
        """
        assert (me.current.name, bind) == self._place, "another listener than the one that runs"
        self._over.set()
        with self._lock:
            self._take = on_link
        self._hand_over()
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
            # The listener ends surplus links, and must not be outdone by a list of them.
            self._kept = [one for one in self._kept if not one.is_over]
            self._kept.append(link)
        self._hand_over()

    def _hand_over(self) -> None:
        """Hand the kept links over, the oldest first, on one thread at a time.

        A link that is not taken ends. An error other than a `ConvoyError` is raised, and the rest stay kept.
        """
        while True:
            with self._lock:
                take, told = self._take, self._told
                waits = None if told is None else told.peer
                link = next((one for one in self._kept if one.peer != waits), None)
                if take is None or link is None or self._is_handing:
                    return
                self._kept.remove(link)
                self._is_handing = True
            try:
                take(link)
            except ConvoyError as error:
                _log.warning("the link from %s was not taken: %s", link.peer, error.message)
                link.close("not taken")
            except BaseException:
                link.close("not taken")
                raise
            finally:
                with self._lock:
                    self._is_handing = False

    def _tick(self) -> None:
        while not self._over.wait(self._tick_s):
            with self._lock:
                self._num_ticks += 1
                is_first, phase = self._num_ticks == 1, self._phase
                progress = Progress(0, int(self._num_ticks * self._tick_s), 0, phase)
                heads = [link for link in self._kept if link.facts.member.head]
            if is_first:
                self._on_slow(phase)
            for link in heads:
                self._say(link, progress)

    def _say(self, link: Link, progress: Progress) -> None:
        """Send outside the lock. No PROGRESS may follow what the taker sends, so the link waits here."""
        with self._lock:
            if self._over.is_set() or link not in self._kept:
                return
            self._told = link
        # The taker learns of a link that has ended.
        with contextlib.suppress(ConvoyError):
            link.send(progress)
        with self._lock:
            self._told = None
        self._hand_over()


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
