"""Serve endpoints of any API that answer from a prompt alone. No request reaches the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convoy.api.body.intake import Intake, most_body_bytes
from convoy.api.body.read_body import read_body
from convoy.api.exchange import Exchange
from convoy.api.keys.keys import Caller
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.service import Service


@dataclass(frozen=True, slots=True)
class PromptEndpoint:
    """Serve one endpoint as an ASGI application. ``read`` turns the bytes of a body into the answer's."""

    service: Service
    options: ServeOptions
    lifecycle: Lifecycle
    intake: Intake
    read: Callable[[bytes, Service, ServeOptions], msgspec.Struct]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        caller: Caller = scope["convoy.caller"]
        with self.lifecycle.answering(), caller.use.begin():
            # A chat may have more bytes than a prompt or a list of ids.
            max_bytes = most_body_bytes(self.service.models, self.options, chat=True)
            upload = self.intake.upload(caller.name)
            try:
                headers = Headers(scope=scope)
                upload.keep(
                    await read_body(headers, receive, self.options, upload=upload, max_bytes=max_bytes)
                )
                answer = await exchange.while_connected(self.intake.read(upload, self._answer))
            finally:
                upload.leave()
            await exchange.send_json(200, answer)

    def _answer(self, data: bytes) -> msgspec.Struct:
        return self.read(data, self.service, self.options)
