"""A send that hangs: a peer that takes nothing must not hold the thread that would notice it.

Where a hidden state or K/V is larger than what the sockets between buffer, a peer that hangs keeps the engine
inside `Link.send_tensor`, where no deadline is looked at. So another thread looks, and ends the link.
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
    """Told by the thread that sends, before and after. ``allowed_s``: how long a part of a step may take."""

    def __init__(self, allowed_s: Callable[[], float]) -> None:
        self._allowed_s = allowed_s
        self._sending: tuple[Link, float, LivenessProbe | None] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="send guard", daemon=True).start()

    def begin(self, link: Link, pulse: LivenessProbe | None = None) -> None:
        """``pulse``: what is sent is long, and may take any time in which the peer shows that it is there."""
        self._sending = (link, time.monotonic(), pulse)

    def end(self) -> None:
        self._sending = None

    def close(self) -> None:
        """Ends its thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            sending = self._sending
            if sending is None or self._closed.is_set():
                continue
            link, since_s, pulse = sending
            took_s = time.monotonic() - since_s
            too_long = took_s > self._allowed_s() if pulse is None else pulse.is_gone()
            if took_s > _LOOK_S and too_long and self._sending is sending:
                self._sending = None
                took_s = time.monotonic() - since_s
                _log.warning("%s hangs in a send that began %.1f s ago: its link ends", link.peer, took_s)
                link.dismiss("it takes nothing", revoke=True)
