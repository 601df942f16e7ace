"""A kernel that passed a machine's self-check, and does not hold for the shapes of the model at hand.

That shows while a stage is loaded, before anything runs; then the plan is made anew with a kernel that holds
on everybody, unless the member was told to run that one and no other.
"""

from __future__ import annotations

import logging

from convoy.cluster.peer.refusal import failed_kernel
from convoy.cluster.presence.mailbox import KernelRefused
from convoy.cluster.presence.peers import Peers
from convoy.errors import ConvoyError
from convoy.wire.messages.control import Plan

_log = logging.getLogger(__name__)


def drop_failed_kernel(company: Peers, plan: Plan, head: str, error: ConvoyError) -> bool:
    """Where ``error`` is that a kernel of ``plan`` does not hold somewhere, it is offered from there no more.

    ``head``: who loads in this process. False where that is not why, or where the member has no other kernel.
    """
    member = error.member if isinstance(error, KernelRefused) else head
    kernel = error.kernel if isinstance(error, KernelRefused) else failed_kernel(plan, head, error)
    why = f"{kernel} does not hold on {member} for this model"
    if not kernel or not company.drop_kernel(member, kernel, why):
        return False
    _log.warning("%s, and another kernel is taken: %s", why, error.message)
    return True
