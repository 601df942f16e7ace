"""Connect the engine's thread with the event loop: submit requests, await outputs, abort the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import anyio.to_thread

from convoy.api.service import Handle, ServedEngine
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import ConvoyError

# Pairs of (index of the request, output).
Batch = list[tuple[int, Output]]


class LoopWaker:
    """Set events of one loop from another thread, many with one call of the loop.

    A step of the engine brings outputs for every stream. Each call of the loop from another thread is a
    system call, during which the engine's thread gives up the interpreter. So all streams of an application
    share one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._events: list[asyncio.Event] = []

    def wake(self, event: asyncio.Event) -> None:
        """Set ``event`` soon, on the loop's thread."""
        with self._lock:
            is_first = not self._events
            self._events.append(event)
        if is_first:
            # A closed loop means that the server has ended, and nothing reads these outputs.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event.set()


class EngineStream:
    """Merge the outputs of several engine requests; the outputs of one request keep their order.

    The engine's thread never waits here: it appends an output and wakes the loop once per batch. At most as
    many tokens wait as the requests may generate. Leaving ``async with`` aborts every request that still
    runs, however the block is left. ``waker`` is that of the running loop.
    """

    def __init__(
        self, engine: ServedEngine, requests: tuple[GenerationRequest, ...], waker: LoopWaker
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._waker = waker
        self._woken = asyncio.Event()
        # Guards the fields that both threads touch: _arrived, _handles and _left.
        self._lock = threading.Lock()
        self._arrived: Batch = []
        self._handles: list[Handle] = []
        self._left = False
        self._unfinished = sum(request.num_choices for request in requests)
        self._broken = False
        # Loop time of the last event to the client.
        self._sent_s = self._loop.time()

    async def __aenter__(self) -> EngineStream:
        """Submit all requests. Raises what `ServedEngine.submit` raises; no request runs then."""
        try:
            # The engine may hold its lock for as long as it takes to sample a batch.
            await anyio.to_thread.run_sync(self._submit_all)
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._leave()

    def fail(self, error: ConvoyError) -> None:
        """End the request with ``error``, whatever the engine does. Call it on the loop's thread."""
        self._deliver(0, ErrorOutput(error))

    def sent(self) -> None:
        """Note that the client has just got an event, for the time of the next empty batch."""
        self._sent_s = self._loop.time()

    async def batches(self, heartbeat_s: float) -> AsyncIterator[Batch]:
        """Yield outputs as they come, until every choice is finished or one `ErrorOutput` came.

        Yields an empty batch ``heartbeat_s`` seconds after the last call of `sent`, and again as long after
        each empty batch. Outputs alone put it off no further: not every output makes an event.
        """
        self.sent()
        while self._unfinished > 0 and not self._broken:
            try:
                async with asyncio.timeout_at(self._sent_s + heartbeat_s):
                    await self._woken.wait()
            except TimeoutError:
                self.sent()
                yield []
                continue
            self._woken.clear()
            with self._lock:
                batch, self._arrived = self._arrived, []
            for _, output in batch:
                if isinstance(output, FinishOutput):
                    self._unfinished -= 1
                elif isinstance(output, ErrorOutput):
                    self._broken = True
            yield batch

    def _submit_all(self) -> None:
        for index, request in enumerate(self._requests):
            with self._lock:
                if self._left:
                    return
            handle = self._engine.submit(request, partial(self._deliver, index))
            with self._lock:
                self._handles.append(handle)
                late = self._left
            # The client disconnected during `submit`. `_leave` did not see this handle, so abort it here.
            if late:
                handle.abort()

    def _deliver(self, index: int, output: Output) -> None:
        with self._lock:
            if self._left:
                return
            # Wake the loop once per batch: a call for every token would slow the engine's thread.
            wake = not self._arrived
            self._arrived.append((index, output))
        if wake:
            self._waker.wake(self._woken)

    def _leave(self) -> None:
        with self._lock:
            if self._left:
                return
            self._left = True
            handles, self._arrived = list(self._handles), []
        if handles and self._unfinished > 0:
            # Abort on a thread, because the engine may hold its lock while it samples a batch.
            self._loop.run_in_executor(None, _abort_all, handles)


def _abort_all(handles: list[Handle]) -> None:
    for handle in handles:
        handle.abort()
