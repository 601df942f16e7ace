"""After a loss: who is still there, which plan comes next, and how long to wait for one.

A lost member breaks the plan, not the requests: the engine waits here and then runs their known tokens again.
A closed link is a loss at once. A step that is late is one once somebody is found who keeps it: a member that
answers no ping, or the first in the ring that has not passed on what came to it. Who cannot be spared is
waited for instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from convoy.cluster.active_plan import ActivePlan, world_sizes
from convoy.cluster.head.head import Head
from convoy.cluster.head.planning import PlannedStages
from convoy.cluster.presence.backoff import Backoff
from convoy.cluster.presence.slow_members import LateMembers
from convoy.cluster.recovery.fault import FaultTracker, find_holder
from convoy.cluster.recovery.outage import OutageLog
from convoy.engine.ranks.executor import GroupExecutor
from convoy.engine.recovery import NewStages, Replan
from convoy.engine.run.pipeline import PipelineExecutor
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
_LOADING_PING_S = 3.0  # a member that loads is busy
_LOOK_UP_S = 0.5
_PACE_S = 0.02  # between two looks, however often members come and go
_MAX_REFUSALS = 2  # of one peer, before the plan is tried without it
_PATIENCE = 4  # looks at one step, before a member that cannot be spared gets its links made anew


@dataclass(slots=True)
class _Late:
    """A step that is late, since when somebody looks for who keeps it, and how often."""

    step: int
    since_s: float = 0.0
    num_looks: int = 0


class StageRecovery:
    """The engine's `Recovery` over a head. ``limits_of`` gives what the scheduler keeps to."""

    def __init__(
        self,
        head: Head,
        wait_s: float,
        load_wait_s: float,
        limits_of: Callable[[ActivePlan], SchedulerLimits],
    ) -> None:
        self._head = head
        self._wait_s = wait_s
        self._whole_s = wait_s + load_wait_s  # all of one recovery, whatever it waits for
        self._gave_up: StageLost | None = None
        self._limits_of = limits_of
        self._cancelled = threading.Event()
        self._state = self._cause = ""
        self._late = _Late(-1)
        self._outage = OutageLog(0.0)
        self._laggards = LateMembers()
        self._refusals: dict[str, int] = {}
        self._blame = FaultTracker()
        self._sums: list[int] = []  # of the plan that was lost
        self._tried: dict[str, Link] = {}  # members of this recovery's plans, as they were then
        self.on_plan: Callable[[set[str]], None] = lambda _tried: None

    def recover(self, error: StageLost) -> NewStages | None:
        """See `engine.recovery.Recovery`. Raises `StageLost` naming the missing layers."""
        began_s = time.monotonic()
        again = error is self._gave_up  # nobody took over in time, and the engine still asks
        if not again:
            self._cause = error.public or "a stage was lost"
        elif self._wait_s < _LOOK_UP_S:  # nobody waits below: the engine must not ask without a pause
            company = self._head.company
            company.wait(company.num_changes, _LOOK_UP_S)
        self._sums = world_sizes(self._granted.plan)
        self._say("looking who is there")
        if isinstance(error, Replan):
            return self._renew(began_s)
        if isinstance(error, StepLate) and self._still_comes():
            return None
        if not again:
            self._outage = OutageLog(self._late.since_s if isinstance(error, StepLate) else began_s)
        self._head.stop()
        self._drop_silent()
        relapse, blamed = not self._lost_text(), self._blamed()
        if relapse:
            self._relapsed(blamed)
        else:
            self._blame.forget()
        if not again and not self._lost_text():  # otherwise `lost` has said who and why
            _log.warning("%s; every member is there", error.message)
        self._head.vetting.settle(self._require_wanted)
        granted = self._find_stages(self._granted.placement, began_s)
        self._outage.end(
            f"recovered: {granted.placement.route.text}, {self._outage.lasts_s:.2f} s after the loss "
            f"({self._outage.found_after_s:.2f} s of it to find out)"
        )
        self._blame.recovered()
        failed_at = blamed[0] if relapse and len(blamed) == 1 else None
        return self._recovered(granted, relapse=relapse, failed_at=failed_at)

    def lost(self, name: str, why: str) -> None:
        """Say who is gone, and with which layers; on the thread that found out, and whatever comes of it."""
        held = [stage for stage in self._granted.plan.stages if name in stage.holders]
        layers = " and ".join(layers_text(stage.start, stage.end) for stage in held) or "no layers"
        output = " and the output" if any(stage.output for stage in held) else ""
        _log.warning("lost: %s, which held %s%s: %s", name, layers, output, why)

    def has_use_for(self, name: str) -> bool:
        """Whether a member without a stage has one in a better plan, slow or not."""
        proposal = self._better(self._head.company.slow.names() - {name})
        return proposal is not None and name in proposal.members - self._granted.members

    def without_stage(self) -> set[str]:
        """Names of the members that are here and hold no stage of the plan that runs."""
        return self._head.company.present().keys() - self._granted.members

    def state(self) -> str:
        return f"{self._state} ({self._cause})"

    def cancel(self) -> None:
        self._cancelled.set()
        self._head.company.wake()

    def _renew(self, began_s: float) -> NewStages | None:
        if self._better(self._head.company.slow.names()) is None:
            return None
        self._head.stop()
        self._outage = OutageLog(began_s)
        self._head.vetting.settle(self._require_wanted)
        granted = self._find_stages(None, began_s)
        took = f"after {self._outage.lasts_s:.2f} s ({self._cause})"
        self._outage.end(f"in use: {granted.placement.route.text}, {took}")
        return self._recovered(granted)

    def _better(self, slow: set[str]) -> PlannedStages | None:
        """A plan that has members which the one that runs lacks, and lacks none but standbys of it."""
        head = self._head
        hellos = head.hellos()
        try:
            proposal = head.planner.again(hellos, None, slow)
        except ConvoyError:
            return None
        if not head.planner.keeps_room(self._granted.placement, proposal.placement):
            return None  # nothing is lost, so nobody who runs may lose the room for its tokens
        standbys = {name for name, hello in hellos.items() if hello.standby}
        kept = self._granted.members - standbys <= proposal.members
        return proposal if kept and proposal.members - self._granted.members else None

    def _recovered(
        self, granted: ActivePlan, *, relapse: bool = False, failed_at: str | None = None
    ) -> NewStages:
        executor = self._head.executor
        assert executor is not None
        links = self._head.links  # one that came on another link since then was not tried
        self.on_plan({name for name, link in self._tried.items() if links.get(name) is link})
        return NewStages(
            executor,
            self._limits_of(granted),
            granted.max_context,
            relapse=relapse,
            failed_at=failed_at,
            same_bits=self._head.planner.same_bits() and world_sizes(granted.plan) == self._sums,
        )

    def _blamed(self) -> tuple[str, ...]:
        executor = self._head.executor
        return executor.blamed if isinstance(executor, PipelineExecutor | GroupExecutor) else ()

    def _relapsed(self, blamed: tuple[str, ...]) -> None:
        """Every member is there, and yet the stages failed: once a wire did, again and again a member does.

        It is given up if it can be spared. Otherwise each try waits longer.
        """
        for name in self._blame.note(blamed):
            if self._can_spare(name):
                self._head.company.give_up(name, "it fails again and again", slow=True)
                return
        wait_s = self._blame.wait_s()
        self._say(f"every member is there; the next try is in {wait_s:.1f} s")
        self._cancelled.wait(wait_s)

    # Is anything lost?

    def _still_comes(self) -> bool:
        """Look for who keeps the late step. True if it is to be waited for: then the clock allows more."""
        executor = self._head.executor
        step = executor.oldest if isinstance(executor, PipelineExecutor) else None
        if step is None:
            return False
        if self._late.step != step:
            self._late = _Late(step, time.monotonic())
        self._late.num_looks += 1
        looks = self._late.num_looks
        answers = self._head.company.answers(
            self._granted.members, _PING_S * 2 ** min(looks - 1, _PATIENCE - 1)
        )
        laggard = self._laggards.note(step, {name: s for name, s in answers.items() if s is not None})
        culprit = self._silent_member({name for name, s in answers.items() if s is None})
        culprit = culprit or self._member_that_keeps(step)
        alone = laggard is not None and culprit in (None, laggard) and self._laggards.is_one(laggard)
        if alone and laggard is not None and self._can_spare(laggard):
            self._laggards.forget(laggard)
            self._head.company.give_up(laggard, "it holds everybody up, step after step", slow=True)
            return False
        if culprit is None or self._keep(culprit):
            # A member that can be spared must not teach the clock its own pace.
            self._head.clock.extend(usual=laggard is None or not self._can_spare(laggard))
            return True
        return False

    def _silent_member(self, silent: set[str]) -> str | None:
        """One that answers no ping, or whose link is over.

        Who can be spared is given up at once; who is needed after some looks, each longer than the last: then
        it may come back on a new link.
        """
        granted, company = self._granted, self._head.company
        looks = self._late.num_looks
        gone = granted.members - company.present().keys() - {self._head.name}
        for name in sorted(silent):
            if looks >= _PATIENCE or self._can_spare(name):
                company.give_up(name, "it answers no ping")
                gone.add(name)
        return min(gone, default=None) or min(silent, default=None)

    def _member_that_keeps(self, step: int) -> str | None:
        """None if all have passed the step on: it is on its way."""
        plan = self._granted.plan
        others = self._granted.members - {self._head.name}
        reached = self._head.company.positions(plan.generation, others, _PING_S)
        ring = [name for stage in plan.stages for name in stage.holders if name in others]
        return find_holder(ring, reached, step)

    def _keep(self, name: str) -> bool:
        """Whether to go on waiting for a member; one that is not kept is given up, or its links made anew."""
        company = self._head.company
        if name not in company.present():
            return False
        if self._late.num_looks == 1:
            return True  # it is there and may be busy: it gets the time once more
        if self._can_spare(name):
            company.give_up(name, "it does not pass on what comes to it", slow=True)
            return False
        _log.warning("%s is slow or hangs, and nobody else can hold its layers", name)
        return self._late.num_looks != _PATIENCE

    def _can_spare(self, name: str) -> bool:
        if name == self._head.name:
            return False
        return self._head.planner.can_spare(name, self._head.hellos(), self._granted.placement)

    # Other stages.

    def _drop_silent(self) -> None:
        """Who hangs at the moment of another's loss must not hold the next plan up, if it can be spared."""
        company = self._head.company
        for name in company.silent(self._granted.members, _PING_S):
            if self._can_spare(name):
                company.give_up(name, "it answers no ping")

    def _find_stages(self, before: Placement | None, began_s: float) -> ActivePlan:
        """The next plan, running, as near to ``before`` as it can be; None: the best one.

        Raises `StageLost` if there was none for too long: what it waits for members is bounded, and all of it
        since ``began_s``.
        """
        backoff, company = Backoff(), self._head.company
        waited_s = 0.0
        self._refusals, self._tried = {}, {}

        def watch() -> None:
            self._require_wanted()
            if time.monotonic() - began_s > self._whole_s:
                raise self._given_up(None)

        while True:
            watch()
            seen, waits_s = company.num_changes, time.monotonic()
            try:
                return self._try_once(before, watch)
            except CapacityError as error:
                why: ConvoyError = error
                self._count_refusal()
                wait_s = min(_LOOK_UP_S, self._wait_s - waited_s)
                left_s = self._wait_s - waited_s
                self._say(f"{self._lost_text()}; waiting for a member for at most {left_s:.0f} s")
                self._outage.wait(self._lost_text(), error.message, self._wait_s)
            except (PeerError, LinkClosed) as error:
                why, wait_s = error, backoff.next_s()
                self._count_refusal()
                self._outage.tell(f"a plan could not be made to run: {error.message}")
                self._say(error.public or "a plan could not be made to run; the next try comes soon")
            if self._head.failed is not None or not isinstance(why, CapacityError):
                waits_s = time.monotonic()  # what was spent on loading is not counted here
            if waited_s >= self._wait_s:
                raise self._given_up(why) from why
            before = self._granted.placement
            if isinstance(why, CapacityError):
                company.wait(seen, wait_s)
                self._cancelled.wait(_PACE_S)
            else:
                self._cancelled.wait(wait_s)
            waited_s += time.monotonic() - waits_s

    def _try_once(self, before: Placement | None, watch: Callable[[], None]) -> ActivePlan:
        head = self._head
        head.failed = None
        hellos = head.hellos()
        for name, count in self._refusals.items():
            if count >= _MAX_REFUSALS and head.planner.can_spare(name, hellos, self._granted.placement):
                hellos.pop(name, None)
        proposal = head.planner.again(hellos, before, head.company.slow.names())
        self._tried |= {name: link for name, link in head.links.items() if name in proposal.members}
        names = " -> ".join("+".join(stage.holders) for stage in proposal.plan.stages)
        self._say(f"{self._lost_text()}; loading for {names}".lstrip("; "))

        def on_load(member: str, done: int, total: int) -> None:
            text = f"{member} has loaded {done / max(1, total):.0%} of what it lacks"
            self._say(text)
            self._outage.progress(text)

        done = threading.Event()
        threading.Thread(target=self._look_after, args=(proposal, done), daemon=True).start()
        try:
            return head.install(proposal, watch, on_load)
        finally:
            done.set()

    def _look_after(self, proposal: PlannedStages, done: threading.Event) -> None:
        """Those that a plan is made for: who hangs meanwhile would be waited for until its link times out."""
        company = self._head.company
        num_silent: Counter[str] = Counter()
        while not done.wait(_PING_S):
            self._outage.tell(f"loading: {proposal.placement.route.text}")
            silent = company.silent(proposal.members, _LOADING_PING_S)
            num_silent = Counter({name: num_silent[name] + 1 for name in silent})
            for name, count in num_silent.items():
                if not done.is_set() and (count >= _PATIENCE or self._can_spare(name)):
                    company.give_up(name, "it answers no ping while it should load")

    def _count_refusal(self) -> None:
        """A peer that is there and says no, again and again, is not asked for ever."""
        name = self._head.failed
        if name is None or name not in self._head.company.present():
            return
        self._refusals[name] = self._refusals.get(name, 0) + 1

    def _given_up(self, why: ConvoyError | None) -> StageLost:
        """``why`` None: members were there, and yet no plan ran in all that time."""
        lost = self._lost_text()
        bound_s = self._whole_s if why is None else self._wait_s
        parts = [lost, f"nobody took over within {bound_s:g} s"]
        reason = self._state if why is None else why.message
        public = "; ".join(part for part in parts if part)
        self._outage.is_open_ended = True
        self._gave_up = StageLost(
            f"{public}: {reason}",
            public=public,
            hint="start the member again, or another one with `convoy join --standby`",
        )
        return self._gave_up

    def _lost_text(self) -> str:
        """``missing layers 4-11, beta is gone``, or nothing where every stage is there."""
        gone = sorted(self._granted.members - self._head.company.present().keys() - {self._head.name})
        if not gone:
            return ""
        verb = "is" if len(gone) == 1 else "are"
        return f"missing {self._head.route().missing}, {' and '.join(gone)} {verb} gone"

    @property
    def _granted(self) -> ActivePlan:
        granted = self._head.granted
        assert granted is not None, "nothing ran, so nothing can be lost"
        return granted

    def _say(self, text: str) -> None:
        self._state = text

    def _require_wanted(self) -> None:
        if self._cancelled.is_set():
            raise LinkClosed("the engine is being closed")
