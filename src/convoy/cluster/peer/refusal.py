"""The answer of a peer to a plan that it cannot follow."""

from __future__ import annotations

from convoy.engine.run.kv_server import MAX_REASON
from convoy.errors import ConvoyError, SelfCheckError, TooLittleMemory
from convoy.transport.link.link import ReceivedMessage
from convoy.wire.messages.control import MAX_OFFER_BYTES, Plan, Refuse


def refusal(received: ReceivedMessage, member: str, error: ConvoyError) -> Refuse:
    """Return the message that tells the head that ``error`` ended the order ``received`` to ``member``."""
    asked = received.message
    kernel = failed_kernel(asked, member, error) if isinstance(asked, Plan) else ""
    hint = (error.hint or "")[:MAX_REASON]
    room_bytes = min(error.room_bytes, MAX_OFFER_BYTES) if isinstance(error, TooLittleMemory) else None
    return Refuse(received.plan_id, error.message[:MAX_REASON], hint, kernel, room_bytes)


def failed_kernel(plan: Plan, member: str, error: ConvoyError) -> str:
    """Return the kernel of ``member`` in ``plan`` if ``error`` says that it failed there; else empty."""
    if not isinstance(error, SelfCheckError):
        return ""
    mine = (position for position, stage in enumerate(plan.stages) if member in stage.holders)
    return next((plan.kernel_of(position) for position in mine), "")
