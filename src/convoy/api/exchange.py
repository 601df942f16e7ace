"""Hold one request and its answer on the wire: the bytes sent so far, and whether the client is connected."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Send

from convoy.api.problem import Problem, body_for
from convoy.api.refusals import ClientGone
from convoy.errors import ConvoyError

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


class Exchange:
    """Wrap ASGI's ``receive`` and ``send`` of one request. A client that does not read counts as gone."""

    def __init__(
        self, receive: Receive, send: Send, write_timeout_s: float, problem: Problem = body_for
    ) -> None:
        self.id = "req-" + secrets.token_hex(8)
        # The HTTP status that was sent; 0 before the headers are out.
        self.status = 0
        self.complete = False
        self.outcome = ""
        # The name of the caller's key, for the log.
        self.caller = ""
        # Headers of every answer to this request.
        self.headers: list[tuple[bytes, bytes]] = []
        # Further headers of an error's answer.
        self.refusal_headers: Callable[[], Mapping[str, str]] = dict
        # Whether a stream is lines of JSON in place of server-sent events.
        self.sends_lines = False
        # An error in the form of the API that was asked: as a body, and as the events that end a stream.
        self.problem = problem
        self.failure: Callable[[BaseException], Sequence[msgspec.Struct]] = lambda error: [problem(error)]
        self._receive = receive
        self._send = send
        self._write_timeout_s = write_timeout_s
        self.cut: ConvoyError | None = None
        self._cut_now = asyncio.Event()

    def fail(self, error: ConvoyError) -> None:
        """Cancel the coroutine in `while_connected`, which then raises ``error``. Call it on the loop's
        thread.
        """
        self.cut = error
        self._cut_now.set()

    async def receive(self) -> Message:
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Send an ASGI message, with the request's id among the headers.

        Raises `ClientGone` if the client does not read within the write timeout.
        """
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *(*message.get("headers", []), *self.headers),
                (b"x-request-id", self.id.encode()),
            ]
        elif not message.get("more_body", False):
            self.complete = True
        try:
            # A client that does not read would otherwise hold its connection and its answer for ever.
            async with asyncio.timeout(self._write_timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None

    async def send_json(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete answer with ``body`` as JSON."""
        data = _encoder.encode(body)
        sent = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        await self.send(answer_start(status, sent))
        await self.send({"type": "http.response.body", "body": data})

    async def send_empty(self, status: int) -> None:
        """Send a complete answer without a body."""
        await self.send(answer_start(status, {}))
        await self.send({"type": "http.response.body", "body": b""})

    async def start_events(self) -> None:
        """Send the headers of a stream."""
        kind = "application/x-ndjson" if self.sends_lines else "text/event-stream; charset=utf-8"
        headers = {"content-type": kind, "cache-control": "no-store"}
        # Without this header nginx buffers the stream and holds tokens back.
        headers["x-accel-buffering"] = "no"
        await self.send(answer_start(200, headers))

    async def send_events(self, events: Iterable[msgspec.Struct], tail: bytes = b"") -> None:
        """Send some events in one write, and ``tail`` after them. The tag of a tagged struct is its name.

        Lines of JSON have no names and no tail.
        """
        if self.sends_lines:
            data = b"".join(_encoder.encode(event) + b"\n" for event in events)
        else:
            data = b"".join(encode_event(event) for event in events) + tail
        if data:
            await self.send_data(data)

    async def send_data(self, data: bytes) -> None:
        """Send a part of an answer's body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and return its result, after the body has been read.

        If the client disconnects first, ``work`` is cancelled and `ClientGone` raised. After `fail`, that
        error is raised instead.
        """
        working = asyncio.ensure_future(work)
        others = [asyncio.ensure_future(self._gone()), asyncio.ensure_future(self._cut_now.wait())]
        try:
            await asyncio.wait({working, *others}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise self.cut or ClientGone()
        finally:
            for task in (working, *others):
                task.cancel()
            await asyncio.gather(working, *others, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self.complete:
            # ASGI also reports "disconnect" after a complete answer; the client is not gone then.
            await asyncio.Event().wait()


def encode_event(event: msgspec.Struct) -> bytes:
    """Return a server-sent event. The tag of a tagged struct is its name."""
    tag = event.__struct_config__.tag
    name = b"" if tag is None else f"event: {tag}\n".encode()
    return name + b"data: " + _encoder.encode(event) + b"\n\n"


def answer_start(status: int, headers: Mapping[str, str]) -> Message:
    """Return ASGI's first message of an answer."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}
