"""Run the first plan over the members that came. If it does not come to run, take the next best plan."""

from __future__ import annotations

import logging
from collections.abc import Callable

from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.head.planning import PlannedStages, Planner
from convoy.cluster.peer.refusal import failed_kernel
from convoy.cluster.presence.mailbox import KernelRefused, MemoryRefused
from convoy.cluster.presence.peers import Peers
from convoy.errors import (
    CapacityError,
    ConvoyError,
    LinkClosed,
    PeerError,
    SelfCheckError,
    SpanError,
    TooLittleMemory,
)
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Hello, Plan

_log = logging.getLogger(__name__)

_PING_S = 1.0
_LOOK_UP_S = 0.5
# How often a plan is made anew because a member was lost and came back while it was loaded.
_MOST_RETURNS = 3


def begin(
    peers: Peers,
    planner: Planner,
    hellos: Callable[[], dict[str, Hello]],
    install: Callable[[PlannedStages], ActivePlan],
    *,
    replaceable: bool,
    watch: Callable[[], None] | None,
) -> ActivePlan:
    """Return the first plan that runs over the members that came.

    If no plan fits without the absent members, raises the error of the first absent one. ``hellos``
    returns the greetings of the connected members, the head's first. ``replaceable``: if ranks cannot
    join, whole layers will do. ``watch`` set: wait for the absent members without end. It is called
    meanwhile, and an error that it raises ends the wait.
    """
    absent = peers.absent
    try:
        proposal = _first(peers, planner, hellos, watch)
        for name, why in absent.items():
            if name in peers.missing():
                _log.warning("%s; the cluster starts without it, and goes on dialling it", why.message)
        returns = _MOST_RETURNS
        while True:
            before = _links(peers, proposal)
            try:
                return install(proposal)
            except (PeerError, LinkClosed, SelfCheckError, TooLittleMemory) as error:
                head = next(iter(hellos()))
                if _drop_failed_kernel(peers, proposal.plan, head, error) or lower(peers, head, error):
                    proposal = _first(peers, planner, hellos, watch)
                    continue
                fell = replaceable and proposal.placement.mode == "tensor"
                is_back = returns > 0 and _links(peers, proposal) != before
                returns -= is_back
                try:
                    proposal = _next(peers, planner, hellos, proposal, error, fell=fell, is_back=is_back)
                except ConvoyError:
                    if watch is None or proposal.members <= hellos().keys():
                        raise
                    proposal = _first(peers, planner, hellos, watch)
    except (CapacityError, SpanError) as error:
        for name, why in absent.items():
            if name in peers.missing():
                raise why from error
        raise


def _first(
    peers: Peers,
    planner: Planner,
    hellos: Callable[[], dict[str, Hello]],
    watch: Callable[[], None] | None,
) -> PlannedStages:
    """Return the first plan that the connected members can hold; ``watch`` as for `begin`."""
    told = None
    while True:
        seen = peers.num_changes
        try:
            return planner.first(hellos())
        except (CapacityError, SpanError) as error:
            missing = peers.missing()
            if watch is None or not missing:
                raise
            if told != (told := missing):
                peers.seek()
                _log.warning("waiting for %s: %s", ", ".join(missing), error.message)
        while peers.num_changes == seen and peers.missing() == missing:
            watch()
            peers.wait(seen, _LOOK_UP_S)


def _links(peers: Peers, proposal: PlannedStages) -> dict[str, Link]:
    """Return the link of each present member of ``proposal``."""
    present = peers.present()
    return {name: present[name][0] for name in proposal.members & present.keys()}


def _next(
    peers: Peers,
    planner: Planner,
    hellos: Callable[[], dict[str, Hello]],
    before: PlannedStages,
    error: ConvoyError,
    *,
    fell: bool,
    is_back: bool,
) -> PlannedStages:
    """Return the next plan after ``before`` failed, over the members that are left, as after a loss.

    ``is_back``: a member was lost, and is back already. If all are left but their ranks could not join, and
    the operator did not demand ranks, the plan has whole layers. Raises ``error`` if none of these is the
    reason, or if no plan fits.
    """
    others = before.members - {next(iter(hellos()))}
    for name in peers.silent(others, _PING_S) if fell else ():
        peers.give_up(name, "it answers no ping")
    gone = others - peers.present().keys()
    if not gone and not is_back and not (fell and planner.has_failed(hellos())):
        raise error
    try:
        proposal = planner.again(hellos(), None)
    except ConvoyError:
        raise error from None
    if gone:
        _log.warning("%s; the cluster starts without %s", error.message, ", ".join(sorted(gone)))
    return proposal


def _drop_failed_kernel(peers: Peers, plan: Plan, head: str, error: ConvoyError) -> bool:
    """Withdraw a member's offer of a kernel if ``error`` says that the kernel failed there.

    A kernel may pass a machine's self-check but fail for the shapes of the model at hand. Loading a stage
    shows that, before anything runs. Then the plan is made anew with a kernel that works on every member.
    If the operator named that one kernel for the member, there is no other to take.

    ``head`` is the member that loads in this process. Returns False if the error has another reason, or
    if the member offers no other kernel.
    """
    member = error.member if isinstance(error, KernelRefused) else head
    kernel = error.kernel if isinstance(error, KernelRefused) else failed_kernel(plan, head, error)
    why = f"{kernel} does not hold on {member} for this model"
    if not kernel or not peers.drop_kernel(member, kernel, why):
        return False
    _log.warning("%s, and another kernel is taken: %s", why, error.message)
    return True


def lower(peers: Peers, head: str, error: ConvoyError) -> bool:
    """Lower the offer of the member that has too little memory, so that the next plan gives it less.

    ``head`` is the member that loads in this process. Returns False if the error has another reason, and if
    the offer is as low already.
    """
    if isinstance(error, MemoryRefused):
        return peers.lower_offer(error.member, error.memory_bytes)
    return isinstance(error, TooLittleMemory) and peers.lower_offer(head, error.room_bytes)
