"""Running, draining, ended: what the server counts so that a drain ends as soon as the last answer does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from convoy.errors import ConvoyError, Draining


class Cuttable(Protocol):
    """Something that runs for a request."""

    def fail(self, error: ConvoyError) -> None:
        """End it with ``error``; on the loop's thread."""
        ...


class Lifecycle:
    """Lives on the event loop's thread."""

    def __init__(self) -> None:
        self.draining = False
        self._num_answers = 0
        self._running: set[Cuttable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_answers(self) -> int:
        """Under way now."""
        return self._num_answers

    @contextmanager
    def answering(self, *, admitted: bool = False) -> Iterator[None]:
        """Around the answer to one request. Raises `Draining` once the server drains, unless it was admitted
        before: as a part of what runs.
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
        """Around what runs, so that `cut` reaches it."""
        self._running.add(work)
        try:
            yield
        finally:
            self._running.discard(work)

    async def wait_idle(self) -> None:
        """Until no request is being answered."""
        await self._idle.wait()

    def cut(self) -> int:
        """End what still runs with an error, never as if it were complete. Returns how many answers."""
        for work in self._running:
            work.fail(Draining("the server shut down before the answer was complete"))
        return self._num_answers
