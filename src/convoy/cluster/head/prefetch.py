"""Fetch the weights of a later plan, at the head: members fetch theirs while another plan runs.

A member that comes, or gets other layers, may have gigabytes to fetch. The new plan is worth a pause of
the running one only when all of that is on its disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from convoy.cluster.head.planning import Planner
from convoy.cluster.presence.peers import Peers
from convoy.cluster.weights.progress_watch import ProgressWatch
from convoy.errors import ConvoyError
from convoy.model.checkpoints.source import needs_no_files
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Plan, Progress
from convoy.wire.messages.fetch import SUPERSEDED, Prepare, Prepared

_log = logging.getLogger(__name__)

# Takes a member, its bytes so far and all of them.
MemberProgress = Callable[[str, int, int], None]

_LOOK_UP_S = 0.5
_MAX_OVER = 64
# Seconds until the plan that came first is looked at.
_AGAIN_S = 1.0


class HeadPrefetch:
    """Prepare later plans at a head. Receiver threads call the handlers; ``joined`` returns at once."""

    def __init__(self, me: str, peers: Peers, planner: Callable[[], Planner], wait_s: float) -> None:
        """Prepare to ask. ``planner`` returns that of the model which runs."""
        self.me = me
        self.peers = peers
        self._planner = planner
        self._wait_s = wait_s
        self._changed = threading.Condition()
        # The members that prepare, by plan id.
        self._asked: dict[int, set[str]] = {}
        self._answers: dict[tuple[int, str], str] = {}
        # Their progress, by plan id.
        self._watches: dict[int, ProgressWatch] = {}
        # The listeners of pulls, by plan id. The other preparations have none.
        self._tells: dict[int, MemberProgress] = {}
        # Ended preparations, for which late answers may still come.
        self._over: deque[int] = deque(maxlen=_MAX_OVER)
        self._num_told = 0

    def handle_prepared(self, link: Link, prepared: Prepared) -> None:
        """Note the answer of a member. Answers that were not asked for are not kept."""
        with self._changed:
            if self._is_asked(link.peer, prepared.plan_id):
                self._answers[prepared.plan_id, link.peer] = prepared.error
            self._changed.notify_all()

    def is_of_prefetch(self, link: Link, progress: Progress) -> bool:
        """Return whether a report of progress is about a plan that is, or was, only prepared."""
        with self._changed:
            is_over = progress.plan_id in self._over
            return is_over or self._is_asked(link.peer, progress.plan_id)

    def handle_progress(self, link: Link, progress: Progress) -> None:
        """Note the progress of a member that prepares."""
        with self._changed:
            is_asked = self._is_asked(link.peer, progress.plan_id)
            if is_asked and self._watches[progress.plan_id].is_further(link.peer, progress):
                self._num_told += 1
            tell = self._tells.get(progress.plan_id) if is_asked else None
            self._changed.notify_all()
        if tell is not None:
            tell(link.peer, progress.loaded_bytes, progress.total_bytes)

    def _is_asked(self, name: str, plan_id: int) -> bool:
        """Return whether a member is asked to prepare that plan. The caller holds the lock."""
        return name in self._asked.get(plan_id, ())

    def joined(self, name: str, then: Callable[[], None], failed: Callable[[], None]) -> None:
        """Call ``then`` once all members have the weights for a plan with ``name``.

        Calls it at once if no member needs any. Calls ``failed`` if a member cannot have them, and
        neither if another plan comes first.
        """
        plan = self._better_with(name)
        if plan is None or needs_no_files(plan.model):
            then()
            return
        threading.Thread(
            target=self._prepare, args=(plan, name, then, failed), name=f"for {name}", daemon=True
        ).start()

    def _better_with(self, name: str) -> Plan | None:
        peers = self.peers
        hellos = {self.me: peers.hello} | {n: hello for n, (_, hello) in peers.present().items()}
        try:
            proposal = self._planner().again(hellos, None, peers.slow.names() - {name})
        except ConvoyError:
            return None
        return proposal.plan if name in proposal.members else None

    def fetch(
        self, make_plan: Callable[[], Plan], watch: Callable[[], None], tell: MemberProgress
    ) -> dict[str, str]:
        """Let the peers of a plan fetch its weights once no other plan is prepared.

        ``make_plan`` is called then, for the members of that moment. Return the reason of each member that
        does not have them. An error of ``watch`` stops the peers. ``tell`` hears of the bytes of each member.
        """
        while True:
            with self._changed:
                while self._asked:
                    watch()
                    self._changed.wait(_LOOK_UP_S)
            plan = make_plan()
            names = self.names(plan)
            with self._changed:
                # A preparation that began meanwhile comes first.
                if not self._asked:
                    self._note(plan, names)
                    self._tells[plan.plan_id] = tell
                    break
        try:
            for name in names:
                tell(name, 0, 0)
            return self._ask(plan, names, watch)
        except BaseException:
            for name, (link, _) in self.peers.present().items():
                if name in names:
                    # The end of a link stops its peer, too.
                    with suppress(ConvoyError):
                        link.send(Prepare())
            raise

    def names(self, plan: Plan) -> set[str]:
        """Return the peers of a plan."""
        return {name for stage in plan.stages for name in stage.holders} - {self.me}

    def _note(self, plan: Plan, names: set[str]) -> None:
        """Note who is asked to prepare a plan. The caller holds the lock."""
        self._asked[plan.plan_id], self._watches[plan.plan_id] = names, ProgressWatch()

    def _ask(self, plan: Plan, names: set[str], watch: Callable[[], None]) -> dict[str, str]:
        """Ask for a plan that was noted, and forget it."""
        try:
            for link in self.peers.require(sorted(names)).values():
                link.send(Prepare(plan))
            return self._wait(plan.plan_id, names, watch)
        finally:
            self._forget(plan.plan_id)

    def _prepare(self, plan: Plan, name: str, then: Callable[[], None], failed: Callable[[], None]) -> None:
        try:
            names = self.names(plan)
            with self._changed:
                self._note(plan, names)
            errors = self._ask(plan, names, lambda: None)
        except ConvoyError as error:
            errors = {name: error.message}
        if not errors:
            then()
            return
        if SUPERSEDED in errors.values() and not self.peers.closed_within(_AGAIN_S):
            # The preparations of two newcomers must not overtake each other for ever. A pull waits for them.
            with self._changed:
                is_with_others = any(
                    name in asked for plan_id, asked in self._asked.items() if plan_id not in self._tells
                )
            if not is_with_others:
                self.joined(name, then, failed)
            return
        for member, why in sorted(errors.items()):
            _log.warning(
                "the layers are not shared out anew for %s: %s lacks the weights: %s", name, member, why
            )
        failed()

    def _wait(self, plan_id: int, names: set[str], watch: Callable[[], None]) -> dict[str, str]:
        """Return the reason of each member that does not have its weights in time.

        The deadline starts anew with each progress.
        """
        until_s, told = time.monotonic() + self._wait_s, self._num_told
        with self._changed:
            while missing := {name for name in names if (plan_id, name) not in self._answers}:
                watch()
                self._changed.wait(_LOOK_UP_S)
                gone = missing - self.peers.present().keys()
                if told != self._num_told:
                    until_s, told = time.monotonic() + self._wait_s, self._num_told
                if gone or time.monotonic() > until_s or self.peers.closed_within(0):
                    return dict.fromkeys(gone or missing, "it is gone" if gone else "it does not get on")
            answers = {name: self._answers[plan_id, name] for name in names}
        return {name: error for name, error in answers.items() if error}

    def _forget(self, plan_id: int) -> None:
        with self._changed:
            self._over.append(plan_id)
            del self._watches[plan_id]
            self._tells.pop(plan_id, None)
            for name in self._asked.pop(plan_id):
                self._answers.pop((plan_id, name), None)
            self._changed.notify_all()
