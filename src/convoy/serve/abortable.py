"""A WebSocket's connection that the application may cut: closing one waits until the other side has read."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_ABORT = "convoy.abort"  # of a scope's extensions


class AbortableSocket(WebSocketsSansIOProtocol):
    """As uvicorn has it, and with `abort`."""

    def handle_connect(self, event: Any) -> None:
        """The application begins after this returns."""
        super().handle_connect(event)
        if self.handshake_initiated and not self.close_sent:
            self.scope["extensions"][_ABORT] = {"abort": self.transport.abort}


def abort(scope: Scope) -> None:
    """Cut the connection of a WebSocket's scope, and drop what waits to be sent."""
    scope["extensions"][_ABORT]["abort"]()
