"""Send a server's status to every open page: asked for once, encoded once, and sent when it changes.

New measurements of links and steps alone are sent every two seconds, so that pages of an idle cluster cost
next to nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio.to_thread
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from convoy.api.exchange import Exchange
from convoy.api.lifecycle import Lifecycle
from convoy.cluster.status import ClusterStatus, without_measurements
from convoy.config.type_resolution import resolved
from convoy.errors import QueueFull

EVENTS = "text/event-stream"
_EVERY_S = 0.5
# Of so many statuses in which nothing but measurements changes, one is sent.
_MEASURED_EVERY = 4
_LOOK_EVERY = 2
_HEARTBEAT = b": alive\n\n"
_HEARTBEAT_EVERY = 10


def wants_events(accept: str) -> bool:
    """Return whether the header ``accept`` names events alone.

    Clients of other paths accept JSON and events in one header. They read one JSON value here.
    """
    return [kind.partition(";")[0].strip().lower() for kind in accept.split(",")] == [EVENTS]


class StatusChanges:
    """Tell which of the statuses that follow each other are sent."""

    def __init__(self) -> None:
        self._sent: Any = None
        self._num_held = 0

    @property
    def wants_measurements(self) -> bool:
        """Return whether the next status is sent in any case."""
        return self._num_held + 1 >= _MEASURED_EVERY

    def take(self, status: Any) -> bool:
        """Return whether ``status`` is sent: it differs from the last one, or measurements are due."""
        steady = _steady(status)
        self._num_held += 1
        if steady == self._sent and self._num_held < _MEASURED_EVERY:
            return False
        self._sent, self._num_held = steady, 0
        return True


def _steady(status: Any) -> Any:
    """Return the part of a status that stays the same while nothing happens."""
    if isinstance(status, msgspec.Raw):
        # A server in a process of its own has the status as the engine's process encoded it.
        with suppress(msgspec.MsgspecError):
            status = msgspec.json.decode(status, type=resolved(ClusterStatus))
    return without_measurements(status) if isinstance(status, ClusterStatus) else status


class StatusFeed:
    """Ask for the status twice a second while a page listens, whatever the number of pages."""

    def __init__(
        self,
        status: Callable[[], Any],
        lifecycle: Lifecycle,
        *,
        max_readers: int = 64,
        every_s: float = _EVERY_S,
        last_status: Callable[[], Any] | None = None,
    ) -> None:
        """Prepare to ask. ``last_status`` is asked where new measurements are not sent anyway."""
        self._status = status
        self._last_status = last_status or status
        self._lifecycle = lifecycle
        self._max_readers = max_readers
        self._every_s = every_s
        self._num_readers = 0
        self._asking: asyncio.Task[None] | None = None
        self._event = b""
        self._number = 0
        self._changes = StatusChanges()
        self._changed = asyncio.Condition()

    async def answer(self, exchange: Exchange, is_allowed: Callable[[], bool]) -> None:
        """Send events until the reader is gone, is no longer allowed, or the server drains.

        Raises `QueueFull` for one reader too many.
        """
        if self._num_readers >= self._max_readers:
            raise QueueFull(
                f"{self._max_readers} pages read the status already", hint="close one, or read /status"
            )
        self._num_readers += 1
        try:
            if self._asking is None:
                self._event, self._number, self._changes = b"", 0, StatusChanges()
                self._asking = asyncio.create_task(self._ask())
            await exchange.start_events()
            await exchange.while_connected(self._send(exchange, is_allowed))
            await exchange.end_events()
        finally:
            self._num_readers -= 1
            if not self._num_readers and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    async def _send(self, exchange: Exchange, is_allowed: Callable[[], bool]) -> None:
        seen, sent = 0, b""
        while True:
            async with self._changed:
                while self._number == seen:
                    await self._changed.wait()
                seen, event = self._number, self._event
            if self._lifecycle.draining or not is_allowed():
                return
            if event != sent:
                await exchange.send_data(event)
                sent = event
            elif seen % _HEARTBEAT_EVERY == 0:
                await exchange.send_data(_HEARTBEAT)

    async def _ask(self) -> None:
        while True:
            event = await anyio.to_thread.run_sync(self._encoded)
            async with self._changed:
                self._event = event or self._event
                self._number += 1
                # Once a second each reader also looks whether it is still allowed.
                if event is not None or self._number % _LOOK_EVERY == 0:
                    self._changed.notify_all()
            await asyncio.sleep(self._every_s)

    def _encoded(self) -> bytes | None:
        """Return the event of the status now, or None if the last one is still good."""
        try:
            status = self._status() if self._changes.wants_measurements else self._last_status()
            if not self._changes.take(status):
                return None
            data = msgspec.json.encode(status)
        except Exception as error:  # noqa: BLE001 - its text may hold a prompt, and pages wait for the next one
            self._changes = StatusChanges()
            data = json.dumps({"failed": type(error).__name__}).encode()
        return b"data: " + data + b"\n\n"


class StreamedStatus(Response):
    """Answer with the events of a feed."""

    def __init__(self, feed: StatusFeed, is_allowed: Callable[[], bool]) -> None:
        super().__init__()
        self._feed = feed
        self._is_allowed = is_allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        # The exchange bounds how long a page may leave its events unread.
        await self._feed.answer(scope["convoy.exchange"], self._is_allowed)
