"""Send an answer to a client, and keep its stream alive while the engine says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from convoy.api.exchange import Exchange, answer_start
from convoy.api.refusals import ClientGone
from convoy.errors import ProviderError
from convoy.fleet.apis.api import EventForm

EVENT_STREAM = "text/event-stream"
# The limit of one event. The last one of a response repeats the whole answer and the request's tools.
MAX_RELAYED_BYTES = 32 * 1024 * 1024


class EventRelay:
    """Write one answer to an exchange, on the event loop's thread.

    A stream that was silent for ``heartbeat_s`` gets an event, also before any provider has answered. Its
    headers are then already sent: an error after that ends the stream as an event, and the headers that came
    later stand in a last comment. Nothing of an engine is sent before its first token, so another provider
    may still take its place.
    """

    def __init__(
        self,
        exchange: Exchange,
        form: EventForm | None = None,
        heartbeat_s: float = 0.0,
        early: Callable[[], Mapping[str, str]] = dict,
        *,
        max_event_bytes: int = MAX_RELAYED_BYTES,
    ) -> None:
        """Make a relay. Without ``form`` it passes bytes on, and keeps nothing alive.

        ``early`` returns the headers that are known before an engine answers. ``max_event_bytes`` bounds what
        is held of an event without an end.
        """
        self._max_event_bytes = max_event_bytes
        self._exchange = exchange
        self._form = form
        self._heartbeat_s = heartbeat_s
        self._early = early
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._sent_s = self._clock()
        self._rest = bytearray()
        # The engine's last event, until the answer has its end.
        self._last = b""
        self._late: Mapping[str, str] = {}
        self._over = False
        # Whether something of an engine was sent.
        self.has_answer = False
        if form is not None:
            exchange.failure = form.failure

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send events while the code inside has nothing to send."""
        beating = None if self._form is None else asyncio.ensure_future(self._beat(self._form))
        try:
            yield
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the headers of an answer that comes in pieces."""
        async with self._lock:
            self.has_answer = True
            if not self._exchange.status:
                if not headers.get("content-type", "").startswith(EVENT_STREAM):
                    # There are no events, so none may be added.
                    self._form = None
                await self._exchange.send(answer_start(status, headers))
            elif status != 200 or not headers.get("content-type", "").startswith(EVENT_STREAM):
                text = "an answer that is no stream came where a stream has begun"
                raise ProviderError(text, public=text)
            else:
                self._late = headers

    async def send(self, piece: bytes) -> None:
        """Send the next piece of the body. Raises `ProviderError` for an event without an end."""
        async with self._lock:
            await self._send(piece if self._form is None else self._events(self._form, piece))

    async def end(self, tail: bytes = b"") -> None:
        """Send the engine's last event and ``tail`` as the last bytes. An event without its end is left out.

        Clients close their connections at the last event, so it waits until the answer is settled.
        """
        async with self._lock:
            await self._end(self._last + tail)

    async def fail(self, tail: bytes) -> None:
        """Send ``tail`` as the last bytes of an answer that broke. The engine's last event is left out."""
        async with self._lock:
            await self._end(tail)

    async def complete(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer, or a refusal. In a stream that has begun it becomes the last event."""
        async with self._lock:
            self.has_answer = True
            form, begun = self._form, bool(self._exchange.status)
            if form is None or not (begun or form.streams(status, body)):
                whole = {**headers, "content-length": str(len(body))}
                await self._exchange.send(answer_start(status, whole))
                await self._end(body)
                return
            if begun:
                self._late = headers
            else:
                events = {**headers, "content-type": f"{EVENT_STREAM}; charset=utf-8"}
                await self._exchange.send(answer_start(200, events))
            await self._end(form.refused(status, body))

    def _events(self, form: EventForm, piece: bytes) -> bytes:
        """Return the events that are complete now, as the client gets them."""
        seen = max(0, len(self._rest) - 1)
        self._rest += piece
        end = self._rest.rfind(b"\n\n", seen)
        if end < 0:
            if len(self._rest) > self._max_event_bytes:
                text = f"an event of the provider has more than {self._max_event_bytes} bytes"
                raise ProviderError(text, public=text)
            return b""
        complete = bytes(self._rest[:end])
        del self._rest[: end + 2]
        passed = bytearray()
        for event in filter(None, complete.split(b"\n\n")):
            passed += self._last
            written = form.pass_on(event)
            self._last = written if form.is_last(event) else b""
            passed += b"" if self._last else written
        return bytes(passed)

    async def _send(self, data: bytes) -> None:
        if data:
            self._sent_s = self._clock()
            await self._exchange.send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, data: bytes) -> None:
        self._over = True
        late = b": headers " + msgspec.json.encode(self._late) + b"\n\n" if self._late else b""
        await self._exchange.send({"type": "http.response.body", "body": data + late})

    async def _beat(self, form: EventForm) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + self._heartbeat_s - self._clock()))
            async with self._lock:
                if self._over or self._form is None:
                    return
                if self._clock() - self._sent_s < self._heartbeat_s:
                    continue
                try:
                    if not self._exchange.status:
                        events = {"content-type": f"{EVENT_STREAM}; charset=utf-8", **self._early()}
                        await self._exchange.send(answer_start(200, events))
                    await self._send(form.keep_alive())
                except ClientGone:
                    # The answer's own next bytes meet the same end.
                    return
