"""Let the application cut a WebSocket's connection: an orderly close waits until the other side has read."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from convoy.api.listen.keep_place import PLACE
from convoy.transport.listen.places import ConnectionSlot

# The name among a scope's extensions.
_ABORT = "convoy.abort"


class AbortableSocket(WebSocketsSansIOProtocol):
    """Extend uvicorn's WebSocket by `abort` and by the connection's place."""

    def __init__(self, *args: Any, place: ConnectionSlot | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place = place

    def connection_lost(self, exc: Exception | None) -> None:
        if self._place is not None:
            self._place.release()
        super().connection_lost(exc)

    def handle_connect(self, event: Any) -> None:
        """Add the extensions to the scope. The application begins after this returns."""
        super().handle_connect(event)
        if self.handshake_initiated and not self.close_sent:
            self.scope["extensions"][_ABORT] = {"abort": self.transport.abort}
            self.scope["extensions"][PLACE] = {"place": self._place}


def abort(scope: Scope) -> None:
    """Cut the connection of a WebSocket's scope, and drop the bytes that wait to be sent."""
    scope["extensions"][_ABORT]["abort"]()
