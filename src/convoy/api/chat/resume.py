"""Keep the events of streams, so that a client whose connection broke gets the rest of them.

A request asks for it by a header. Its events then have ids, and its generation writes into a `KeptStream`
instead of a connection. Connections come and go: each sends the events from a number on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from convoy.api.exchange import Exchange, encode_event
from convoy.api.listen.options import ResumeOptions
from convoy.api.problem import log_internal_error
from convoy.api.refusals import RateLimited, StreamTaken, UnknownStream
from convoy.errors import ConvoyError, RequestError

_log = logging.getLogger(__name__)

# Names in lower case, as ASGI has them.
RESUMABLE = "convoy-resumable"
LAST_EVENT_ID = "last-event-id"
# For an event's place in the list.
_EVENT_BYTES = 64
# A client that does not read makes the server hold no more than one such part of a stream a second time.
_MAX_WRITE_BYTES = 256 * 1024
_TAKEN = "another connection has resumed this stream"


class EventSink(Protocol):
    """Declare what takes the events of a stream: a connection, or a kept stream."""

    id: str
    caller: str
    # 0 before the headers are out.
    status: int
    outcome: str
    failure: Callable[[BaseException], Sequence[msgspec.Struct]]

    async def start_events(self) -> None:
        """Begin the stream."""

    async def send_events(self, events: Iterable[msgspec.Struct], tail: bytes = b"") -> None:
        """Send events, and ``tail`` after them: another event or a comment."""

    async def end_events(self) -> None:
        """End the stream."""


def asks_to_resume(headers: Mapping[str, str]) -> bool:
    """Return whether a request wants a stream that can be resumed. Raises `RequestError` for another value
    than true or false.
    """
    value = headers.get(RESUMABLE, "false").lower()
    if value not in {"true", "false"}:
        raise RequestError(f"the header {RESUMABLE} is {value[:40]!r}, expected true or false")
    return value == "true"


def refuse_to_resume(headers: Mapping[str, str]) -> None:
    """Raise `UnknownStream` for a request that resumes a stream, at a server that keeps none."""
    if LAST_EVENT_ID in headers:
        raise UnknownStream(
            "this server keeps no streams", hint=f"send the request again without {LAST_EVENT_ID}"
        )


class KeptStream:
    """Hold the events of one answer. It is an `EventSink`. Use it on the event loop's thread."""

    def __init__(self, request_id: str, caller: str, kind: str, share: _Share, streams: KeptStreams) -> None:
        self.id = request_id
        self.caller = caller
        self.kind = kind
        self.share = share
        # The part of the ids of its events that others cannot guess.
        self.name = secrets.token_hex(16)
        self.status = 0
        self.outcome = ""
        self.failure: Callable[[BaseException], Sequence[msgspec.Struct]] = lambda _: ()
        self.num_bytes = 0
        self._streams = streams
        self._events: list[bytes] = []
        # The number of the first event that is still here.
        self._first = 0
        self._comment = b""
        self._is_complete = False
        self._error: BaseException | None = None
        # Set when there is something new, or when another connection takes over. None without a connection.
        self._woken: asyncio.Event | None = None
        self._exchange: Exchange | None = None
        self._is_free = asyncio.Event()
        self._was_sent = False
        self._work: asyncio.Task[None] | None = None
        self._expiry: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Return whether the answer has ended and no connection reads it."""
        return (self._is_complete or self._error is not None) and self._woken is None

    def begin(self, work: Awaitable[None], held: AbstractContextManager[object]) -> None:
        """Run ``work``, which writes the events. An error of it ends the connection.

        ``held`` is left once the work has ended and its connection, if there is one, has sent everything.
        """
        self._work = asyncio.ensure_future(self._run(work, held))

    async def start_events(self) -> None:
        """Note that the stream has begun."""
        self.status = 200

    async def send_events(self, events: Iterable[msgspec.Struct], tail: bytes = b"") -> None:
        """Keep events, each with its id. A comment as ``tail`` goes to the present connection alone."""
        for event in events:
            self._append(encode_event(event))
        if tail.startswith(b":"):
            self._comment = tail
        elif tail:
            self._append(tail)
        self._wake()

    async def end_events(self) -> None:
        """Note that the stream is complete."""
        self._is_complete = True
        self._wake()

    async def send_to(self, exchange: Exchange, number: int = 0) -> None:
        """Send the events from ``number`` on, those that are still to come included, until the last one.

        An earlier connection of this stream ends with `StreamTaken`, also one that does not read. Raises
        `UnknownStream` if some of these events are no longer here, and the error that the generation ended
        with.
        """
        # A number that is refused must not end the present connection.
        self._check(number)
        woken = self._attach(exchange)
        try:
            while self._woken is woken:
                self._check(number)
                new = self._part(number)
                if self.status and not exchange.status:
                    exchange.failure = self.failure
                    await exchange.start_events()
                if new:
                    self._was_sent = True
                    number += len(new)
                    await exchange.send_data(b"".join(new))
                elif self._comment:
                    comment, self._comment = self._comment, b""
                    await exchange.send_data(comment)
                elif self._error is not None:
                    raise self._error
                elif self._is_complete:
                    exchange.outcome = self.outcome or "complete"
                    await exchange.end_events()
                    return
                else:
                    await woken.wait()
                    woken.clear()
            raise StreamTaken(_TAKEN)
        finally:
            self._detach(woken)

    def trim(self, *, keep_last: bool) -> bool:
        """Forget the older half of the events, or all of them without ``keep_last``. Return whether any was
        forgotten.
        """
        num_events = len(self._events) // 2 if keep_last else len(self._events)
        freed = sum(len(event) + _EVENT_BYTES for event in self._events[:num_events])
        del self._events[:num_events]
        self._first += num_events
        self.num_bytes -= freed
        self.share.num_bytes -= freed
        return num_events > 0

    def drop(self) -> None:
        """Forget everything, and end the work that still runs."""
        self._streams.forget(self)
        self._events.clear()
        for task in (self._work, self._expiry):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    async def _run(self, work: Awaitable[None], held: AbstractContextManager[object]) -> None:
        with held:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - raised again where a connection reads the stream
                self._error = error
                if self._woken is None and not isinstance(error, ConvoyError):
                    # With a connection, the guard logs it.
                    log_internal_error(_log, self.id, error)
                self._wake()
            while self._woken is not None:
                await self._is_free.wait()

    def _append(self, event: bytes) -> None:
        event = f"id: {self.name}-{self._first + len(self._events)}\n".encode() + event
        self._events.append(event)
        self._streams.grow(self, len(event) + _EVENT_BYTES)

    def _check(self, number: int) -> None:
        if not self._first <= number <= self._first + len(self._events):
            raise UnknownStream("the events after this id are no longer kept")

    def _part(self, number: int) -> list[bytes]:
        """Return the events from ``number`` on that one write sends: at least one if there is one."""
        begin = end = number - self._first
        num_bytes = 0
        while end < len(self._events):
            num_bytes += len(self._events[end])
            if end > begin and num_bytes > _MAX_WRITE_BYTES:
                break
            end += 1
        return self._events[begin:end]

    def _wake(self) -> None:
        if self._woken is not None:
            self._woken.set()

    def _attach(self, exchange: Exchange) -> asyncio.Event:
        self._wake()
        if self._exchange is not None:
            # It may wait for its client to read, and would not notice until the write timeout.
            self._exchange.fail(StreamTaken(_TAKEN))
        self._exchange = exchange
        self._woken = asyncio.Event()
        self._is_free.clear()
        self._comment = b""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        return self._woken

    def _detach(self, woken: asyncio.Event) -> None:
        if self._woken is not woken:
            return
        self._woken = None
        self._exchange = None
        self._is_free.set()
        if self._was_sent:
            self._expiry = asyncio.ensure_future(self._expire())
        else:
            # No client has an id of this stream.
            self.drop()

    async def _expire(self) -> None:
        await self._streams.options.sleep(self._streams.options.deadline_s)
        self.drop()


@dataclass(slots=True)
class _Share:
    """Hold the streams of one key, oldest first, and their bytes."""

    key: bytes
    streams: dict[str, KeptStream] = field(default_factory=dict)
    num_bytes: int = 0

    def free(self) -> bool:
        """Drop the oldest stream that is over, or else the older events of the largest that has several.

        If each stream has one event at most, the largest is emptied. Return whether anything was there to
        free.
        """
        over = next((stream for stream in self.streams.values() if stream.is_over), None)
        if over is not None:
            over.drop()
            return True
        streams = sorted(self.streams.values(), key=lambda stream: stream.num_bytes, reverse=True)
        return any(stream.trim(keep_last=keep) for keep in (True, False) for stream in streams)


class KeptStreams:
    """Hold the streams of all keys that can be resumed, within bounds. Use it on the event loop's thread."""

    def __init__(self, options: ResumeOptions) -> None:
        self.options = options
        self._shares: dict[bytes, _Share] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes that all streams hold."""
        return sum(share.num_bytes for share in self._shares.values())

    @property
    def num_streams(self) -> int:
        """Return how many streams are kept."""
        return sum(len(share.streams) for share in self._shares.values())

    def open(self, key: bytes, kind: str, exchange: Exchange) -> KeptStream:
        """Return a new stream of the key with the salt ``key``. Raises `RateLimited`.

        A key with all its streams loses the oldest one that is over. If there are too many in all, the key
        with the most streams loses one.
        """
        options = self.options
        share = self._shares.get(key) or _Share(key)
        while True:
            if len(share.streams) >= options.max_streams_each:
                shares = [share]
            elif self.num_streams >= options.max_streams:
                shares = sorted(self._shares.values(), key=lambda one: len(one.streams), reverse=True)
            else:
                break
            over = next((stream for one in shares for stream in one.streams.values() if stream.is_over), None)
            if over is None:
                raise RateLimited(
                    f"{len(share.streams)} streams of this key and {self.num_streams} in all can be resumed, "
                    f"and the limits are {options.max_streams_each} and {options.max_streams}",
                    retry_after_s=1.0,
                    hint=f"wait for one to end, or leave out the header {RESUMABLE}",
                )
            over.drop()
        stream = KeptStream(exchange.id, exchange.caller, kind, share, self)
        self._shares[key] = share
        share.streams[stream.name] = stream
        return stream

    def find(self, key: bytes, kind: str, event_id: str) -> tuple[KeptStream, int]:
        """Return the stream of an event, and the number of the next event. Raises `UnknownStream`.

        The stream must belong to ``key`` and to an endpoint of ``kind``.
        """
        name, _, digits = event_id.rpartition("-")
        share = self._shares.get(key)
        stream = None if share is None else share.streams.get(name)
        is_number = digits.isascii() and digits.isdigit() and len(digits) < 10
        # The answer is the same for an id that never was, so that nothing tells about another key's ids.
        if stream is None or stream.kind != kind or not is_number:
            raise UnknownStream(
                "no stream with this event is kept for this key",
                hint=f"a stream is kept for {self.options.deadline_s:g} s after its connection broke, and "
                f"only if its request had the header {RESUMABLE}: true",
            )
        return stream, int(digits) + 1

    def grow(self, stream: KeptStream, num_bytes: int) -> None:
        """Count bytes of ``stream`` and make room for them. Its own key pays first, then the largest one."""
        stream.num_bytes += num_bytes
        stream.share.num_bytes += num_bytes
        while stream.share.num_bytes > self.options.max_bytes_each and stream.share.free():
            pass
        while self.num_bytes > self.options.max_bytes:
            shares = sorted(self._shares.values(), key=lambda share: share.num_bytes, reverse=True)
            if not any(share.free() for share in shares):
                return

    def forget(self, stream: KeptStream) -> None:
        """Remove a stream."""
        share = stream.share
        if share.streams.pop(stream.name, None) is not None:
            share.num_bytes -= stream.num_bytes
        if not share.streams:
            self._shares.pop(share.key, None)
