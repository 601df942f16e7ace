"""When the layers are shared out anew because somebody came: once nothing runs, or at last between two steps.

A member that came back counts at the next loss in any case. To use it before costs every stream a pause, so
where something always runs it has to wait, and one that comes and goes waits longer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from convoy.cluster.company import Company
from convoy.cluster.recovery import StageRecovery
from convoy.engine.between import Between
from convoy.engine.recovered import Renewal
from convoy.errors import ConvoyError

_log = logging.getLogger(__name__)

BUSY_S = 30.0  # after it came: until then it is used only where nothing runs
AGAIN_S = 180.0  # between two interruptions because of one member
MAX_AT_ONCE = 5  # so often one that comes again is used as soon as nothing runs; then only now and then


class Renewals:
    """Asks an engine for other stages. ``joined`` is called on threads that may end at once.

    ``when_idle`` and ``between_steps`` are the engine's `renew` and `between_steps`.
    """

    def __init__(
        self,
        company: Company,
        recovery: StageRecovery,
        when_idle: Callable[[str], None],
        between_steps: Callable[[Between], Any],
    ) -> None:
        self._company = company
        self._recovery = recovery
        self._when_idle = when_idle
        self._between_steps = between_steps
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._num_joined: dict[str, int] = {}
        self._used_s: dict[str, float] = {}

    def joined(self, name: str) -> None:
        """A member came that may make a better plan."""
        if not self._recovery.has_use_for(name):
            return
        with self._lock:
            self._num_joined[name] = self._num_joined.get(name, 0) + 1
            if self._num_joined[name] <= MAX_AT_ONCE and not self._company.slow.left_s(name):
                self._when_idle(_why(name))
            if name in self._waiting:
                return
            self._waiting.add(name)
        threading.Thread(target=self._wait, args=(name,), name=f"renew for {name}", daemon=True).start()

    def _wait(self, name: str) -> None:
        left_s = self._left_s(name)
        try:
            while left_s > 0.0:
                if self._company.closed_within(left_s):
                    return
                left_s = self._company.slow.left_s(name) if name in self._company.present() else 0.0
        finally:
            with self._lock:
                self._waiting.discard(name)
        if name not in self._company.present() or not self._recovery.has_use_for(name):
            return
        self._used_s[name] = time.monotonic()

        def renew(*_: object) -> None:
            raise Renewal(_why(name))

        try:
            self._between_steps(renew)
        except ConvoyError as error:
            if not isinstance(error, Renewal):  # it recovers now, or is closed: then nobody has to be asked
                _log.debug("not shared out anew for %s: %s", name, error.message)

    def _left_s(self, name: str) -> float:
        again_s = self._used_s.get(name, -math.inf) + AGAIN_S - time.monotonic()
        return max(BUSY_S, again_s, min(self._company.slow.left_s(name), threading.TIMEOUT_MAX))


def _why(name: str) -> str:
    return f"{name} is here again"
