"""Serve the paths of the Responses API: generate, and read and delete what is stored."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from convoy.api.exchange import Exchange
from convoy.api.keys.keys import Caller
from convoy.api.refusals import UnknownResponse
from convoy.api.responses.answer import refusal_events
from convoy.api.responses.shapes import DeletedResponse
from convoy.api.responses.store import ResponseStore
from convoy.api.responses.translate import ContextFailed


class StreamedRefusals:
    """Wrap the endpoint that generates: a stream that does not fit the context gets the error as an event.

    Codex recognises a full context only by a ``response.failed`` with the code context_length_exceeded. All
    other refusals before the first token keep their status, because proxies and OpenAI's client act on it.
    """

    def __init__(self, generate: ASGIApp) -> None:
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["convoy.exchange"]
        try:
            await self._generate(scope, receive, send)
        except ContextFailed as error:
            exchange.outcome = type(error).__name__
            await exchange.start_events()
            await exchange.send_events(refusal_events(error))
            await exchange.end_events()


class StoredResponses:
    """Answer for single responses. Without a store every id is unknown."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def answer(self, request: Request) -> Response:
        """Return a response, or delete it. Raises `UnknownResponse`, also for another key's response."""
        if self._store is None:
            raise UnknownResponse(
                "this server stores no responses", hint="--store-responses turns the store on"
            )
        caller: Caller = request.scope["convoy.caller"]
        response_id = request.path_params["id"]
        if request.method == "DELETE":
            self._store.delete(caller.salt, response_id)
            body = msgspec.json.encode(DeletedResponse(response_id))
        else:
            body = self._store.body(caller.salt, response_id)
        return Response(body, media_type="application/json")
