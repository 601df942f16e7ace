"""What a peer answers to a plan that it cannot follow."""

from __future__ import annotations

from convoy.engine.run.kv_server import MAX_REASON
from convoy.errors import ConvoyError, SelfCheckError
from convoy.transport.link.link import ReceivedMessage
from convoy.wire.messages.control import Plan, Refuse


def refusal(received: ReceivedMessage, member: str, error: ConvoyError) -> Refuse:
    """``error`` ended what ``received`` asked of ``member``."""
    asked = received.message
    kernel = failed_kernel(asked, member, error) if isinstance(asked, Plan) else ""
    hint = (error.hint or "")[:MAX_REASON]
    return Refuse(received.generation, error.message[:MAX_REASON], hint, kernel)


def failed_kernel(plan: Plan, member: str, error: ConvoyError) -> str:
    """The kernel of ``member`` in ``plan``, where ``error`` is that it does not hold there; else empty."""
    if not isinstance(error, SelfCheckError):
        return ""
    mine = (position for position, stage in enumerate(plan.stages) if member in stage.holders)
    return next((plan.kernel_of(position) for position in mine), "")
