"""After a loss: find the members that remain, choose the next plan, and wait for members if none fits.

A lost member breaks the plan, not the requests: the engine waits here and then runs their known tokens
again. A closed link is a loss at once. A late step is a loss only once the search names the member that
holds it: one that answers no ping, or the first in the ring that has not forwarded the step. If no other
member can take over that member's layers, recovery waits for it instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from convoy.cluster.active_plan import ActivePlan, world_sizes
from convoy.cluster.head.bring_up import lower
from convoy.cluster.head.head import Head
from convoy.cluster.head.planning import PlannedStages
from convoy.cluster.presence.backoff import Backoff
from convoy.cluster.presence.slow_members import LateMembers
from convoy.cluster.recovery.fault import FaultTracker, find_holder
from convoy.cluster.recovery.outage import OutageLog
from convoy.engine.run.executor import NewStages, Replan
from convoy.engine.scheduler import SchedulerLimits
from convoy.errors import (
    CapacityError,
    ConvoyError,
    LinkClosed,
    PeerError,
    StageLost,
    StepLate,
)
from convoy.plan.placement.placement import Placement
from convoy.plan.span import layers_text
from convoy.transport.link.link import Link

_log = logging.getLogger(__name__)

_PING_S = 1.0
# A member that loads is busy, so it gets longer.
_LOADING_PING_S = 3.0
_LOOK_UP_S = 0.5
# The shortest pause between two looks, however often members come and go.
_PACE_S = 0.02
# Refusals of one peer before a plan is tried without it.
_MAX_REFUSALS = 2
# Looks at one step before a member that is needed gets its links made anew.
_MAX_LOOKS = 4


@dataclass(slots=True)
class _Late:
    """Hold a late step, the time of the first look at it, and the number of looks."""

    step: int
    since_s: float = 0.0
    num_looks: int = 0


class StageRecovery:
    """Implement the engine's `Recovery` over a head. ``limits_of`` returns a plan's scheduler limits."""

    def __init__(
        self,
        head: Head,
        wait_s: float,
        load_wait_s: float,
        limits_of: Callable[[ActivePlan], SchedulerLimits],
    ) -> None:
        self._head = head
        self._wait_s = wait_s
        # The bound of one whole recovery, whatever it waits for.
        self.whole_s = wait_s + load_wait_s
        # The error of the last search, while no plan was found since.
        self.gave_up: StageLost | None = None
        self._limits_of = limits_of
        self._cancelled = threading.Event()
        self._state = self._cause = ""
        self._late = _Late(-1)
        self._outage = OutageLog(0.0)
        self._late_members = LateMembers()
        self._refusals: dict[str, int] = {}
        self._faults = FaultTracker()
        # The lost plan's number of ranks for each layer's sums; see `world_sizes`.
        self._sums: list[int] = []
        # The members of this recovery's plans, with the links that they had then.
        self._tried: dict[str, Link] = {}
        self.on_plan: Callable[[set[str]], None] = lambda _tried: None

    def recover(self, error: StageLost) -> NewStages | None:
        """Return new stages, or None if the late step is to be waited for.

        See `engine.run.executor.Recovery`. Raises `StageLost` naming the missing layers.
        """
        began_s = time.monotonic()
        # The last search ended without a plan, and the engine still asks.
        again = error is self.gave_up
        if not again:
            self._cause = error.public or "a stage was lost"
        # The search below would not wait at all, so wait here: the engine must not ask without a pause.
        elif self._wait_s < _LOOK_UP_S:
            peers = self._head.peers
            peers.wait(peers.num_changes, _LOOK_UP_S)
        self._sums = world_sizes(self._active.plan)
        self._say("looking for the members that remain")
        if isinstance(error, StepLate) and self._still_comes():
            return None
        if not again:
            self._outage = OutageLog(self._late.since_s if isinstance(error, StepLate) else began_s)
        self._head.stop()
        # A second member may hang at the same moment; find out before a plan is made with it.
        self._drop_silent()
        without_loss, suspects = not self._lost_text(), self._suspects()
        if without_loss:
            self._failed_without_loss(suspects)
        else:
            self._faults.forget()
        # If a member is lost, `lost` has already named it and the reason.
        if not again and not self._lost_text():
            _log.warning("%s; every member is there", error.message)
        self._head.verifier.settle(self._require_wanted)
        active = self.find_stages(self._active.placement, began_s)
        self._outage.end(
            f"recovered: {active.placement.route.text}, {self._outage.lasts_s:.2f} s after the loss "
            f"({self._outage.found_after_s:.2f} s of it to find out)"
        )
        self._faults.recovered()
        failed_at = suspects[0] if without_loss and len(suspects) == 1 else None
        return self._recovered(active, without_loss=without_loss, failed_at=failed_at)

    def replan(self, request: Replan) -> NewStages | None:
        """Return better stages, or None if there are none. Raises as `recover`."""
        began_s = time.monotonic()
        self._cause = request.why
        self._sums = world_sizes(self._active.plan)
        self._say("looking for the members that remain")
        if self._better(self._head.peers.slow.names()) is None:
            return None
        self._head.stop()
        self._outage = OutageLog(began_s)
        self._head.verifier.settle(self._require_wanted)
        active = self.find_stages(None, began_s)
        took = f"after {self._outage.lasts_s:.2f} s ({self._cause})"
        self._outage.end(f"in use: {active.placement.route.text}, {took}")
        return self._recovered(active)

    def lost(self, name: str, why: str) -> None:
        """Log which member is gone, and with which layers. Called at once, on the thread that found out."""
        held = [stage for stage in self._active.plan.stages if name in stage.holders]
        layers = " and ".join(layers_text(stage.start, stage.end) for stage in held) or "no layers"
        output = " and the output" if any(stage.output for stage in held) else ""
        _log.warning("lost: %s, which held %s%s: %s", name, layers, output, why)

    def would_use(self, name: str) -> bool:
        """Return whether a better plan would use a member that has no stage now, slow or not."""
        proposal = self._better(self._head.peers.slow.names() - {name})
        return proposal is not None and name in proposal.members - self._active.members

    def without_stage(self) -> set[str]:
        """Return the names of the connected members that hold no stage of the running plan."""
        return self._head.peers.present().keys() - self._active.members

    def state(self) -> str:
        return f"{self._state} ({self._cause})"

    def cancel(self) -> None:
        self._cancelled.set()
        self._head.peers.wake()

    def _better(self, slow: set[str]) -> PlannedStages | None:
        """Return a plan with members that the running one lacks, and without losing any but its standbys."""
        head = self._head
        hellos = head.hellos()
        try:
            proposal = head.planner.again(hellos, None, slow)
        except ConvoyError:
            return None
        if not head.planner.keeps_room(self._active.placement, proposal.placement):
            # No stage is lost, so no running request may lose the room for its tokens.
            return None
        standbys = {name for name, hello in hellos.items() if hello.standby}
        kept = self._active.members - standbys <= proposal.members
        return proposal if kept and proposal.members - self._active.members else None

    def _recovered(
        self, active: ActivePlan, *, without_loss: bool = False, failed_at: str | None = None
    ) -> NewStages:
        executor = self._head.executor
        assert executor is not None
        # A member that came back on another link since then was not tried on it.
        links = self._head.links
        self.on_plan({name for name, link in self._tried.items() if links.get(name) is link})
        return NewStages(
            executor,
            self._limits_of(active),
            active.max_context,
            without_loss=without_loss,
            failed_at=failed_at,
            same_bits=self._head.planner.same_bits() and world_sizes(active.plan) == self._sums,
            near_tie=self._head.planner.near_tie(),
        )

    def _suspects(self) -> tuple[str, ...]:
        executor = self._head.executor
        return () if executor is None else executor.suspects

    def _failed_without_loss(self, suspects: tuple[str, ...]) -> None:
        """Handle a failure of the stages while every member is connected.

        A link may fail once without a cause; a member fails again and again. That member is given up if
        it can be spared. Otherwise each try waits longer.
        """
        for name in self._faults.note(suspects):
            if self._can_spare(name):
                self._head.peers.give_up(name, "it fails again and again", slow=True)
                return
        wait_s = self._faults.wait_s()
        self._say(f"every member is there; the next try is in {wait_s:.1f} s")
        self._cancelled.wait(wait_s)

    # Is a member lost?

    def _still_comes(self) -> bool:
        """Look for the member that holds the late step.

        Returns True if the step is to be waited for; the clock then allows more time.
        """
        executor = self._head.executor
        step = None if executor is None else executor.oldest
        if step is None:
            return False
        if self._late.step != step:
            self._late = _Late(step, time.monotonic())
        self._late.num_looks += 1
        looks = self._late.num_looks
        answers = self._head.peers.answers(
            self._active.members, _PING_S * 2 ** min(looks - 1, _MAX_LOOKS - 1)
        )
        late_member = self._late_members.note(step, {name: s for name, s in answers.items() if s is not None})
        culprit = self._silent_member({name for name, s in answers.items() if s is None})
        # If every member answers, the step is stuck in one's inbox. Their positions tell which.
        culprit = culprit or self._find_holder(step)
        # Suspect the late member only if no other member explains the late step.
        alone = (
            late_member is not None
            and culprit in (None, late_member)
            and self._late_members.is_one(late_member)
        )
        if alone and late_member is not None and self._can_spare(late_member):
            self._late_members.forget(late_member)
            self._head.peers.give_up(late_member, "it holds the others up, step after step", slow=True)
            return False
        if culprit is None or self._keep(culprit):
            # A member that can be spared must not teach the clock its own pace.
            self._head.clock.extend(usual=late_member is None or not self._can_spare(late_member))
            return True
        return False

    def _silent_member(self, silent: set[str]) -> str | None:
        """Return a member that answers no ping or has no open link; None if there is none.

        A member that can be spared is given up at once. A member that is needed is given up after some
        looks, each longer than the last: then it may come back on a new link.
        """
        active, peers = self._active, self._head.peers
        looks = self._late.num_looks
        gone = active.members - peers.present().keys() - {self._head.name}
        for name in sorted(silent):
            if looks >= _MAX_LOOKS or self._can_spare(name):
                peers.give_up(name, "it answers no ping")
                gone.add(name)
        return min(gone, default=None) or min(silent, default=None)

    def _find_holder(self, step: int) -> str | None:
        """Return the member that holds ``step``; None if every member has forwarded it."""
        plan = self._active.plan
        others = self._active.members - {self._head.name}
        reached = self._head.peers.positions(plan.plan_id, others, _PING_S)
        ring = [name for stage in plan.stages for name in stage.holders if name in others]
        return find_holder(ring, reached, step)

    def _keep(self, name: str) -> bool:
        """Return whether to go on waiting for a member.

        A member that is not kept is given up, or its links are made anew.
        """
        peers = self._head.peers
        if name not in peers.present():
            return False
        if self._late.num_looks == 1:
            # The member is connected and may be busy, so it gets the time once more.
            return True
        if self._can_spare(name):
            peers.give_up(name, "it does not forward the steps that it receives", slow=True)
            return False
        _log.warning("%s is slow or hangs, and no other member can hold its layers", name)
        return self._late.num_looks != _MAX_LOOKS

    def _can_spare(self, name: str) -> bool:
        if name == self._head.name:
            return False
        return self._head.planner.can_spare(name, self._head.hellos(), self._active.placement)

    # Other stages.

    def _drop_silent(self) -> None:
        """Give up silent members that can be spared, so that they do not hold the next plan up."""
        peers = self._head.peers
        for name in peers.silent(self._active.members, _PING_S):
            if self._can_spare(name):
                peers.give_up(name, "it answers no ping")

    def find_stages(self, before: Placement | None, began_s: float) -> ActivePlan:
        """Return the next plan, running, as near to ``before`` as possible; with None, the best plan.

        Two bounds apply: the wait for members, and the whole time since ``began_s``.
        Raises `StageLost` if there was no plan for too long.
        """
        backoff, peers = Backoff(), self._head.peers
        waited_s = 0.0
        self._refusals, self._tried = {}, {}

        def watch() -> None:
            self._require_wanted()
            if time.monotonic() - began_s > self.whole_s:
                raise self._given_up(None)

        while True:
            watch()
            seen, waits_s = peers.num_changes, time.monotonic()
            try:
                return self._try_once(before, watch)
            except CapacityError as error:
                if lower(peers, self._head.name, error):
                    continue
                why: ConvoyError = error
                self._count_refusal()
                wait_s = min(_LOOK_UP_S, self._wait_s - waited_s)
                left_s = self._wait_s - waited_s
                self._say(f"{self._lost_text()}; waiting for a member for at most {left_s:.0f} s")
                self._outage.wait(self._lost_text(), error.message, self._wait_s)
            except (PeerError, LinkClosed) as error:
                # A plan that fails because the engine ends is no failure to report.
                self._require_wanted()
                if lower(peers, self._head.name, error):
                    continue
                why, wait_s = error, backoff.next_s()
                self._count_refusal()
                self._outage.tell(f"a plan could not be made to run: {error.message}")
                self._say(error.public or "a plan could not be made to run; the next try comes soon")
            if self._head.failed is not None or not isinstance(why, CapacityError):
                # The time spent on loading does not count as waiting for a member.
                waits_s = time.monotonic()
            if waited_s >= self._wait_s:
                raise self._given_up(why) from why
            before = self._active.placement
            if isinstance(why, CapacityError):
                peers.wait(seen, wait_s)
                self._cancelled.wait(_PACE_S)
            else:
                self._cancelled.wait(wait_s)
            waited_s += time.monotonic() - waits_s

    def _try_once(self, before: Placement | None, watch: Callable[[], None]) -> ActivePlan:
        head = self._head
        head.failed = None
        hellos = head.hellos()
        # A peer that refused too often is left out, but only if a plan exists without it.
        for name, count in self._refusals.items():
            if count >= _MAX_REFUSALS and head.planner.can_spare(name, hellos, self._active.placement):
                hellos.pop(name, None)
        proposal = head.planner.again(hellos, before, head.peers.slow.names())
        self._tried |= {name: link for name, link in head.links.items() if name in proposal.members}
        names = " -> ".join("+".join(stage.holders) for stage in proposal.plan.stages)
        self._say(f"{self._lost_text()}; loading for {names}".lstrip("; "))

        def on_load(member: str, done: int, total: int) -> None:
            percent = int(100 * done / max(1, total))
            loaded = f": {percent}% of what it lacks" if percent else ""
            text = f"loading at {member}{loaded}"
            self._say(text)
            self._outage.progress(text)

        done = threading.Event()
        threading.Thread(target=self._look_after, args=(proposal, done), daemon=True).start()
        try:
            return head.install(proposal, watch, on_load)
        finally:
            done.set()

    def _look_after(self, proposal: PlannedStages, done: threading.Event) -> None:
        """Give up members of a plan that hang while it loads.

        Otherwise the head waits until their links time out.
        """
        peers = self._head.peers
        num_silent: Counter[str] = Counter()
        while not done.wait(_PING_S):
            self._outage.tell(f"loading: {proposal.placement.route.text}")
            silent = peers.silent(proposal.members, _LOADING_PING_S)
            num_silent = Counter({name: num_silent[name] + 1 for name in silent})
            for name, count in num_silent.items():
                if not done.is_set() and (count >= _MAX_LOOKS or self._can_spare(name)):
                    peers.give_up(name, "it answers no ping while it should load")

    def _count_refusal(self) -> None:
        """Count a refusal of a connected peer, so that a peer that always refuses is not asked for ever."""
        name = self._head.failed
        if name is None or name not in self._head.peers.present():
            return
        self._refusals[name] = self._refusals.get(name, 0) + 1

    def _given_up(self, why: ConvoyError | None) -> StageLost:
        """Return the error of a search that ended.

        ``why`` is None if members were there but no plan ran in time.
        """
        lost = self._lost_text()
        bound_s = self.whole_s if why is None else self._wait_s
        parts = [lost, f"nobody took over within {bound_s:g} s"]
        reason = self._state if why is None else why.message
        public = "; ".join(part for part in parts if part)
        self._outage.is_open_ended = True
        self.gave_up = StageLost(
            f"{public}: {reason}",
            public=public,
            hint="start the member again, or another one with `convoy join --standby`",
        )
        return self.gave_up

    def _lost_text(self) -> str:
        """Return ``missing layers 4-11, beta is gone``, or an empty text if every stage is there."""
        gone = sorted(self._active.members - self._head.peers.present().keys() - {self._head.name})
        if not gone:
            return ""
        verb = "is" if len(gone) == 1 else "are"
        return f"missing {self._head.route().missing}, {' and '.join(gone)} {verb} gone"

    @property
    def _active(self) -> ActivePlan:
        active = self._head.active_plan
        assert active is not None, "no plan ran, so none can be lost"
        return active

    def _say(self, text: str) -> None:
        self._state = text

    def _require_wanted(self) -> None:
        if self._cancelled.is_set():
            raise LinkClosed("the engine is being closed")
