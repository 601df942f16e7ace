"""Keep the place of an admitted request's connection, so that it no longer gives way to newer ones."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.transport.listen.places import ConnectionSlot

# The name among a scope's extensions.
PLACE = "convoy.place"


def keep_place(scope: Scope) -> None:
    """Mark the request of ``scope`` as admitted. Raises `QueueFull` if too many are being answered."""
    place: ConnectionSlot | None = scope.get("extensions", {}).get(PLACE, {}).get("place")
    if place is not None:
        place.keep()


def keeping_place(app: ASGIApp) -> ASGIApp:
    """Keep the place of each request that has its body read by ``app``: admission comes before the body."""

    async def kept(scope: Scope, receive: Receive, send: Send) -> None:
        is_let_in = False

        async def receiving() -> Message:
            nonlocal is_let_in
            # Later calls may come after the answer, when the connection waits again.
            if not is_let_in:
                keep_place(scope)
                is_let_in = True
            return await receive()

        # A WebSocket's first message only asks to open it, so reading it does not mean admission.
        await app(scope, receiving if scope["type"] == "http" else receive, send)

    return kept
