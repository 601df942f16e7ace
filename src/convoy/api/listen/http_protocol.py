"""Extend uvicorn's HTTP protocol by bounds on the bytes that a client may send before it is authenticated."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from convoy.api.listen.http_limits import HttpLimits
from convoy.api.listen.keep_place import PLACE
from convoy.api.problem import answer_for, body_for, headers_for
from convoy.api.refusals import HeaderTooLong, NotHttp
from convoy.errors import ConvoyError
from convoy.transport.listen.places import ConnectionSlot
from convoy.transport.log_limit import RateLimitedLog

# Small enough that the parser buffers little between two checks, large enough that a body costs few calls.
_PIECE_BYTES = 16 * 1024
# The most bytes of pipelined requests, which wait unparsed. One read of the event loop is at most this long.
_MAX_AHEAD_BYTES = 512 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Serve one connection within the listener's limits.

    The parser gets its bytes in pieces, so that an endless header is seen before it is kept: the parser
    itself joins all parts of a header's value, which costs the square of their length. Requests that a client
    sends before it got its answers wait unparsed.
    """

    def __init__(
        self, *args: Any, limits: HttpLimits, place: ConnectionSlot, log: BoundedLogger, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self._log = log
        if self.ws_protocol_class is not None:
            # uvicorn calls this attribute as it would call the class.
            self.ws_protocol_class = cast("Any", partial)(self.ws_protocol_class, place=place)
        self._limits = limits
        self._place = place
        self._ahead = bytearray()
        self._refusal: ConvoyError | None = None
        self._upgraded = False
        self._in_header = False
        self._num_fields = 0
        # Bytes since the last part of a body, or since the last header's end.
        self._num_quiet_bytes = 0
        # Bytes of a body that came after its request was answered.
        self._num_discarded = 0
        # Whether the present piece ended a header or had a part of a body.
        self._moved_on = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._place.cut = transport.abort

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.release()
        self._ahead.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if len(self._ahead) + len(data) > _MAX_AHEAD_BYTES:
            # The client sends on without reading its answers.
            self.transport.abort()
            return
        self._ahead += data
        self._feed()

    def _feed(self) -> None:
        """Parse the bytes so far, up to a request that has to wait for the one before it."""
        data, self._ahead = bytes(self._ahead), bytearray()
        at = 0
        while at < len(data) and not (self.transport.is_closing() or self._upgraded):
            # The request before is still being answered. Stop reading, so that TCP slows the client down.
            if self.pipeline:
                self.flow.pause_reading()
                self._ahead += data[at:]
                return
            # Bytes without progress count against the header's limit, also chunk extensions and trailers.
            room = self._limits.max_header_bytes - self._num_quiet_bytes
            if room <= 0:
                self.refuse(HeaderTooLong(f"a header may have {self._limits.max_header_bytes} bytes"))
                return
            piece = data[at : at + min(_PIECE_BYTES, room)]
            at += len(piece)
            self._moved_on = False
            super().data_received(piece)
            self._num_quiet_bytes = 0 if self._moved_on else self._num_quiet_bytes + len(piece)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_header = True
        self._num_fields = self._num_discarded = 0
        if self.cycle is not None:
            # The bytes before it in this piece belong to an earlier request.
            self._moved_on = True
            if self.cycle.response_complete:
                self._place.wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        if self._num_fields > self._limits.max_header_fields:
            self._refusal = HeaderTooLong(f"a header may have {self._limits.max_header_fields} fields")
            raise self._refusal
        # A trailer counts like the header's fields, and nothing here reads it.
        if self._in_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._moved_on = True
        self._place.work()
        self.scope["extensions"] = {PLACE: {"place": self._place}}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._moved_on = True
        if self.cycle is not None and self.cycle.response_complete:
            self._num_discarded += len(body)
            if self._num_discarded > self._limits.max_discarded_bytes:
                self.transport.abort()
                return
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and self.cycle.response_complete:
            # Also while the connection closes: a client that does not read holds no place.
            self._place.wait()
        if self._ahead:
            self.loop.call_soon(self._feed)

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's, in its words
        self.refuse(self._refusal or NotHttp("this is not an HTTP request"))

    def refuse(self, error: ConvoyError) -> None:
        """Answer with ``error`` and close the connection."""
        host = self.client[0] if self.client else "?"
        self._log.limited.warning(type(error).__name__, f"refused a request from {host}: {error.message}")
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            # An answer is under way, and must not look complete.
            self.transport.abort()
            return
        status, body = answer_for(error).status, msgspec.json.encode(body_for(error))
        headers = {"content-type": "application/json", "content-length": str(len(body)), **headers_for(error)}
        # Written by hand: uvicorn can answer only requests that it has parsed.
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{n}: {v}" for n, v in headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


class BoundedLogger(logging.Logger):
    """Bound the lines that clients can cause in uvicorn's log.

    Clients can repeat uvicorn's warnings at will. The warnings pass through ``limited``, which counts those
    that it leaves out.
    """

    def __init__(self) -> None:
        super().__init__("uvicorn.error")
        self.parent = logging.getLogger("uvicorn.error")
        self.limited = RateLimitedLog(self.parent)
        self.addFilter(self._pass)

    def _pass(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        # `refuse` logs this one with its reason.
        if record.msg != "Invalid HTTP request received.":
            self.limited.warning(str(record.msg), record.getMessage())
        return False
