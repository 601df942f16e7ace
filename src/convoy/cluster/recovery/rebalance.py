"""Share the layers out anew when a member comes: once no request runs, or after a while between two steps.

A member that came back counts at the next loss in any case. To use it earlier costs every stream a pause.
So where requests always run it has to wait, and a member that comes and goes waits longer.

A member may come while a recovery still looks for stages. Then it is compared with the lost plan, which
it may have been in. So after each new plan every connected member without a stage is considered once
more. The same happens when the preparation of a plan failed, once the member has waited: the missing
weights may be there by then.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from convoy.cluster.options import RebalanceOptions
from convoy.cluster.presence.peers import Peers
from convoy.cluster.recovery.recovery import StageRecovery
from convoy.engine.active import Between
from convoy.engine.run.executor import Replan
from convoy.errors import ConvoyError

_log = logging.getLogger(__name__)

# Doublings of `RebalanceOptions.again_s` for a member if no plan with it comes to run.
_MAX_DOUBLINGS = 5


class Rebalancer:
    """Ask an engine for other stages. ``joined`` and ``plan_began`` return soon, on any thread.

    ``when_idle`` and ``between_steps`` are the engine's `renew` and `between_steps`. ``prepare`` fetches
    weights for a plan with the named member. It calls its second argument once every member has them, and
    its third if a member cannot have them.
    """

    def __init__(
        self,
        peers: Peers,
        recovery: StageRecovery,
        when_idle: Callable[[str], None],
        between_steps: Callable[[Between], Any],
        prepare: Callable[[str, Callable[[], None], Callable[[], None]], None],
        *,
        options: RebalanceOptions,
    ) -> None:
        self._peers = peers
        self._recovery = recovery
        self._when_idle = when_idle
        self._between_steps = between_steps
        self._prepare = prepare
        self._options = options
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._num_joined: dict[str, int] = {}
        self._considered_s: dict[str, float] = {}
        self._used_s: dict[str, float] = {}
        # Plans with this member that never ran, since it came.
        self._num_in_vain: dict[str, int] = {}

    def joined(self, name: str) -> None:
        """Consider a member that came and may make a better plan."""
        with self._lock:
            self._num_in_vain.pop(name, None)
        self.begin(name)

    def begin(self, name: str) -> None:
        """Prepare a plan with ``name``, and consider it then."""
        self._prepare(name, lambda: self._consider(name), lambda: self._failed(name))

    def plan_began(self, tried: Collection[str]) -> None:
        """Consider every member that is here without a stage.

        ``tried`` are the members that the search for this plan tried; some may be in it.
        """
        threading.Thread(
            target=self.look_round, args=(set(tried),), name="consider idle", daemon=True
        ).start()

    def look_round(self, tried: set[str]) -> None:
        """Consider every member that is here without a stage, on this thread; see `plan_began`."""
        without_stage = self._recovery.without_stage()
        with self._lock:
            for name in tried & without_stage:
                self._count_in_vain(name)
            without_stage -= self._waiting
        for name in sorted(without_stage):
            if self._recovery.would_use(name):
                self.begin(name)

    def _count_in_vain(self, name: str) -> None:
        self._num_in_vain[name] = self._num_in_vain.get(name, 0) + 1
        self._used_s[name] = time.monotonic()

    def _failed(self, name: str) -> None:
        """Look at all members without a stage again, once ``name`` has waited; returns at once."""
        with self._lock:
            self._count_in_vain(name)
            if name in self._waiting:
                return
            self._waiting.add(name)
        threading.Thread(
            target=self._look_again, args=(name,), name=f"look again at {name}", daemon=True
        ).start()

    def _look_again(self, name: str) -> None:
        if self._has_waited(name):
            # The failed preparation may have been for other members too.
            self.look_round(set())

    def _consider(self, name: str) -> None:
        if not self._recovery.would_use(name):
            return
        with self._lock:
            self._num_joined[name] = self._num_joined.get(name, 0) + 1
            self._considered_s[name] = time.monotonic()
            # An idle moment costs no stream a pause, so a member is used at once there, unless it comes and
            # goes.
            at_once = self._num_joined[name] <= self._options.max_at_once and name not in self._num_in_vain
            if at_once and not self._peers.slow.left_s(name):
                self._when_idle(_why(name))
            if name in self._waiting:
                return
            self._waiting.add(name)
        threading.Thread(target=self._wait, args=(name,), name=f"renew for {name}", daemon=True).start()

    def _wait(self, name: str) -> None:
        if not self._has_waited(name):
            return
        # A plan that begins from here on is followed by a look at this member; one before is compared below.
        if name not in self._peers.present() or not self._recovery.would_use(name):
            return
        self._used_s[name] = time.monotonic()

        try:
            self._between_steps(lambda *_: Replan(_why(name)))
        except ConvoyError as error:
            # The engine recovers or closes, so no new plan has to be asked for.
            _log.debug("not shared out anew for %s: %s", name, error.message)

    def _has_waited(self, name: str) -> bool:
        """Wait as long as ``name`` has to. Returns False if the head closed."""
        while left_s := self.left_s(name):
            if self._peers.closed_within(min(left_s, self._options.busy_s)):
                return False
        return True

    def left_s(self, name: str) -> float:
        """Return how many seconds this member still waits; 0 also if it is gone.

        At 0 the member no longer counts as waiting.
        """
        with self._lock:
            num_in_vain = min(self._num_in_vain.get(name, 0), _MAX_DOUBLINGS)
            again_s = self._used_s.get(name, -math.inf) + self._options.again_s * 2 ** max(0, num_in_vain - 1)
            busy_s = self._considered_s.get(name, -math.inf) + self._options.busy_s
            left_s: float = max(busy_s, again_s) - time.monotonic()
            left_s = max(0.0, left_s, self._peers.slow.left_s(name))
            if not left_s or name not in self._peers.present():
                # Under the lock, so that a member that comes now begins anew.
                self._waiting.discard(name)
                return 0.0
        return left_s


def _why(name: str) -> str:
    return f"{name} is here"
