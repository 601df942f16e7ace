"""From an application's scope to its connection's place: a request that was let in no longer gives way."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.transport.listen.places import ConnectionSlot

PLACE = "convoy.place"  # of a scope's extensions


def keep_place(scope: Scope) -> None:
    """Say that what ``scope`` asks was let in. Raises `QueueFull` where too many are answered already."""
    place: ConnectionSlot | None = scope.get("extensions", {}).get(PLACE, {}).get("place")
    if place is not None:
        place.keep()


def keeping_place(app: ASGIApp) -> ASGIApp:
    """Keep the place of a request whose body ``app`` reads: no body is read before its request was let in."""

    async def kept(scope: Scope, receive: Receive, send: Send) -> None:
        is_let_in = False

        async def receiving() -> Message:
            nonlocal is_let_in
            if not is_let_in:  # later calls may come after the answer, when the connection waits again
                keep_place(scope)
                is_let_in = True
            return await receive()

        # A WebSocket's first message says only that it wants to be opened.
        await app(scope, receiving if scope["type"] == "http" else receive, send)

    return kept
