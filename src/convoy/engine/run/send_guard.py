"""Detect a send that hangs: a peer that takes nothing must not hold the thread that would notice it.

If a hidden state or K/V is larger than the buffers of the sockets, a hanging peer keeps the engine inside
`Link.send_tensor`, where no deadline is checked. So another thread checks, and ends the link.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from convoy.engine.run.liveness import LivenessProbe
from convoy.transport.link.link import Link

_log = logging.getLogger(__name__)

_LOOK_S = 0.5


class SendGuard:
    """Watch one sending thread, which calls `begin` and `end` around each send.

    ``allowed_s`` returns how many seconds a part of a step may take.
    """

    def __init__(self, allowed_s: Callable[[], float]) -> None:
        self._allowed_s = allowed_s
        self._sending: tuple[Link, float, LivenessProbe | None] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="send guard", daemon=True).start()

    def begin(self, link: Link, probe: LivenessProbe | None = None) -> None:
        """Start the watch of a send over ``link``.

        With ``probe``, the send is long: it may take any time as long as the peer shows that it is alive.
        """
        self._sending = (link, time.monotonic(), probe)

    def end(self) -> None:
        self._sending = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            sending = self._sending
            if sending is None or self._closed.is_set():
                continue
            link, since_s, probe = sending
            took_s = time.monotonic() - since_s
            too_long = took_s > self._allowed_s() if probe is None else probe.is_gone()
            if took_s > _LOOK_S and too_long and self._sending is sending:
                self._sending = None
                took_s = time.monotonic() - since_s
                _log.warning("%s hangs in a send that began %.1f s ago: its link ends", link.peer, took_s)
                link.dismiss("it takes nothing", revoke=True)
