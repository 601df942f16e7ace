"""Where one step spent its time: computing, being sealed, on the wire, and waiting, at each member.

Each stage measures its own part. No two clocks have to agree: a peer tells its times relative to its answer,
and the head places them by the round trip of the question (D. Mills, RFC 5905, section 8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from convoy.cluster.status import StepPart, StepPath
from convoy.engine.run.stage_worker import StepMarks
from convoy.wire.messages.control import Plan

# A peer that does not answer in this time is left out until the status is asked for again.
_ASK_S = 0.25

Ask = Callable[[int, set[str], float], dict[str, list[StepMarks]]]


def find_step_path(plan: Plan, head: str, own: Sequence[StepMarks], ask: Ask) -> StepPath | None:
    """Return the way of the newest step that all members of ``plan`` still know; None if there is none.

    ``own`` are the head's marks, and ``ask`` returns those of peers by the head's clock. Stages of several
    ranks have no marks.
    """
    names = [stage.member for stage in plan.stages if stage.member != head]
    if not own or not names or any(stage.world_size > 1 for stage in plan.stages):
        return None
    told = ask(plan.plan_id, set(names), _ASK_S)
    at = {name: {one.number: one for one in marks} for name, marks in told.items()}
    for mine in reversed(own):
        peers = [(name, at[name][mine.number]) for name in names if mine.number in at.get(name, {})]
        if len(peers) == len(names):
            return split_step(head, mine, peers)
    return None


class StepPaths:
    """Find the way of the newest step, and ask peers only if a step ended since the last one."""

    def __init__(self) -> None:
        self._known: tuple[int, StepPath] | None = None

    def find(self, plan: Plan, head: str, own: Sequence[StepMarks], ask: Ask) -> StepPath | None:
        """Return what `find_step_path` does."""
        known = self._known
        if known is not None and own and known[0] == plan.plan_id and known[1].number == own[-1].number:
            return known[1]
        path = find_step_path(plan, head, own, ask)
        self._known = None if path is None else (plan.plan_id, path)
        return path


def split_step(head: str, own: StepMarks, peers: Sequence[tuple[str, StepMarks]]) -> StepPath:
    """Return the parts of one step. ``peers`` have its marks in the order of its way, by the head's clock.

    The parts add up to ``step_s``. Half a round trip at most may stand on the wrong side of a link.
    """
    parts: list[StepPart] = []
    # At the head, telling all peers of the step counts as sealing.
    part = StepPart(head, 0.0, 0.0, own.computed_s - own.began_s, own.began_s - own.arrived_s)
    computed_s, sending_s = own.computed_s, own.sent_s - own.computed_s
    # What the peers still to come need, from the arrival to the result.
    stays_s = sum(one.computed_s - one.arrived_s for _, one in peers)
    for name, one in peers:
        # A peer cannot have the step before the member ahead sent it, nor so late that the end could not
        # have come when it did. If its times were placed outside, they all move together.
        arrived_s = min(max(one.arrived_s, computed_s), own.returned_s - stays_s)
        stays_s -= one.computed_s - one.arrived_s
        seal_s, wire_s = _hop(arrived_s - computed_s, sending_s)
        parts.append(_sealed(part, seal_s))
        part = StepPart(name, wire_s, one.began_s - one.arrived_s, one.computed_s - one.began_s, 0.0)
        computed_s = arrived_s + one.computed_s - one.arrived_s
        sending_s = one.sent_s - one.computed_s
    seal_s, wire_s = _hop(own.returned_s - computed_s, sending_s)
    parts.append(_sealed(part, seal_s))
    parts.append(StepPart(head, wire_s, own.taken_s - own.returned_s, own.ended_s - own.taken_s, 0.0))
    return StepPath(own.number, own.ended_s - own.arrived_s, parts)


def _hop(hop_s: float, sending_s: float) -> tuple[float, float]:
    """Return the seconds of sealing and of the wire in a hop.

    The next member may have the frame before the sender's call returns, so the two may overlap.
    """
    hop_s = max(0.0, hop_s)
    seal_s = min(hop_s, sending_s)
    return seal_s, hop_s - seal_s


def _sealed(part: StepPart, seal_s: float) -> StepPart:
    return msgspec.structs.replace(part, seal_s=part.seal_s + seal_s)
