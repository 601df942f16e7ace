"""Count the answers under way, so that a drain ends as soon as the last answer does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from convoy.errors import ConvoyError, Draining


class Cuttable(Protocol):
    """Declare work for a request that can be ended early."""

    def fail(self, error: ConvoyError) -> None:
        """End the work with ``error``. Called on the loop's thread."""
        ...


class Lifecycle:
    """Track whether the server runs, drains or is idle. Use it on the event loop's thread."""

    def __init__(self) -> None:
        self.draining = False
        self._num_answers = 0
        self._running: set[Cuttable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_answers(self) -> int:
        """Return the number of requests that are being answered."""
        return self._num_answers

    @contextmanager
    def answering(self, *, admitted: bool = False) -> Iterator[None]:
        """Count the answer to one request inside this block. Raises `Draining` once the server drains.

        A part of a request that was admitted earlier passes ``admitted`` and is never refused.
        """
        if self.draining and not admitted:
            raise Draining("the server is shutting down", hint="send the request to another server")
        self._num_answers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_answers -= 1
            if not self._num_answers:
                self._idle.set()

    @contextmanager
    def running(self, work: Cuttable) -> Iterator[None]:
        """Register ``work`` inside this block, so that `cut` reaches it."""
        self._running.add(work)
        try:
            yield
        finally:
            self._running.discard(work)

    def reach(self, work: Cuttable) -> None:
        """Let `cut` reach ``work`` from now on."""
        self._running.add(work)

    async def wait_idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    def cut(self) -> int:
        """End all running work with an error, never as if it were complete. Return the number of answers."""
        for work in self._running:
            work.fail(Draining("the server shut down before the answer was complete"))
        return self._num_answers
