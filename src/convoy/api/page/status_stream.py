"""Send the cluster's status to every open page: asked for once, encoded once, and sent when it changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import msgspec

from convoy.api.exchange import Exchange
from convoy.api.lifecycle import Lifecycle
from convoy.errors import QueueFull

EVENTS = "text/event-stream"
_EVERY_S = 0.5
_HEARTBEAT = b": alive\n\n"
_HEARTBEAT_EVERY = 10


def wants_events(accept: str) -> bool:
    """Return whether the header ``accept`` names events alone.

    Clients of other paths accept JSON and events in one header. They read one JSON value here.
    """
    return [kind.partition(";")[0].strip().lower() for kind in accept.split(",")] == [EVENTS]


class StatusFeed:
    """Ask for the status twice a second while a page listens, whatever the number of pages."""

    def __init__(
        self,
        status: Callable[[], Any],
        lifecycle: Lifecycle,
        *,
        max_readers: int = 64,
        every_s: float = _EVERY_S,
    ) -> None:
        self._status = status
        self._lifecycle = lifecycle
        self._max_readers = max_readers
        self._every_s = every_s
        self._num_readers = 0
        self._asking: asyncio.Task[None] | None = None
        self._event = b""
        self._number = 0
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
                self._event, self._number = b"", 0
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
                self._event = event
                self._number += 1
                self._changed.notify_all()
            await asyncio.sleep(self._every_s)

    def _encoded(self) -> bytes:
        try:
            data = msgspec.json.encode(self._status())
        except Exception as error:  # noqa: BLE001 - its text may hold a prompt, and pages wait for the next one
            data = json.dumps({"failed": type(error).__name__}).encode()
        return b"data: " + data + b"\n\n"
