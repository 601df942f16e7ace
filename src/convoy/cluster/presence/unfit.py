"""Replace a kernel that passed a machine's self-check but fails for the shapes of the model at hand.

Loading a stage shows that, before anything runs. Then the plan is made anew with a kernel that works on
every member. If the operator named that one kernel for the member, there is no other to take.
"""

from __future__ import annotations

import logging

from convoy.cluster.peer.refusal import failed_kernel
from convoy.cluster.presence.mailbox import KernelRefused
from convoy.cluster.presence.peers import Peers
from convoy.errors import ConvoyError
from convoy.wire.messages.control import Plan

_log = logging.getLogger(__name__)


def drop_failed_kernel(peers: Peers, plan: Plan, head: str, error: ConvoyError) -> bool:
    """Withdraw a member's offer of a kernel if ``error`` says that the kernel failed there.

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
