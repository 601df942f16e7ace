"""Serve consumers that send their text: the coordinator seals it to the provider that it picks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convoy.api.body.intake import Intake, Upload
from convoy.api.body.read_body import read_body
from convoy.api.chat.resume import refuse_to_resume
from convoy.api.exchange import Exchange, encode_event
from convoy.api.keys.repeats import Repeats
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.refusals import UnknownModel
from convoy.errors import Unavailable
from convoy.fleet.answer import SEALED_HEADER, AnswerHead, is_too_long
from convoy.fleet.apis.table import APIS
from convoy.fleet.consumer_request import read_consumer_request
from convoy.fleet.coordinator.callers import Consumer
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.fleet.coordinator.requests.attempt import OwnSeal
from convoy.fleet.coordinator.requests.routed_request import (
    GONE,
    Begun,
    RoutedRequest,
    consuming,
    hold_of,
    no_provider,
    pass_on,
)
from convoy.fleet.event_relay import EventRelay
from convoy.fleet.outcomes import outcome_of
from convoy.fleet.timing import Timing
from convoy.wire.fleet.messages import Kind

_BAD_REQUEST = 400


@dataclass(frozen=True, slots=True)
class Consume:
    """Be the ASGI endpoint. `api.guard.Guard` turns its errors into answers while nothing was sent."""

    coordinator: Coordinator
    options: ServeOptions
    lifecycle: Lifecycle
    intake: Intake
    repeats: Repeats
    kind: Kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        timing = Timing(parts=self.coordinator.options.traces.is_on)
        exchange.refusal_headers = timing.header
        headers = Headers(scope=scope)
        refuse_to_resume(headers)
        with self.lifecycle.answering(), self.lifecycle.running(exchange):
            # Authenticate before reading: the bodies of strangers are not kept.
            async with consuming(self.coordinator, headers) as consumer:
                upload = self.intake.upload(consumer.account)
                consumer.at_end.callback(upload.leave)
                data = await read_body(headers, receive, self.options, upload=upload)
                upload.keep(data)
                await exchange.while_connected(
                    self._run(consumer, upload, data, headers, exchange, timing=timing)
                )

    async def _run(
        self,
        consumer: Consumer,
        upload: Upload,
        data: bytes,
        headers: Headers,
        exchange: Exchange,
        *,
        timing: Timing,
    ) -> None:
        account, use = consumer.account, consumer.use
        mark = self.repeats.check(account, self.kind, data)
        with timing.measure("parse"):
            options = self.coordinator.options
            read = partial(
                read_consumer_request,
                kind=self.kind,
                account=account,
                models=options.models,
                cache_key=options.cache_key,
            )
            # A short body takes about as long as a thread's start; a long one would hold up every stream.
            wanted = await self.intake.read(upload, read) if upload.is_long else read(upload.take())
            check_known(self.coordinator, wanted.model)
            hold = hold_of(self.coordinator, account, wanted, data, headers)
            hold = replace(hold, spends=consumer.grant.spends)
            use.hold(wanted.prompt_tokens, 0)
        parent = headers.get("traceparent", "")
        routed = RoutedRequest(self.coordinator, account, wanted, timing, hold, parent=parent, use=use)
        await routed.reserve()
        try:
            await self._serve(routed, exchange, mark)
            exchange.outcome = exchange.outcome or "complete"
        except BaseException as error:
            exchange.outcome = outcome_of(exchange.cut or error)
            raise
        finally:
            routed.report(exchange.outcome)

    async def _serve(self, routed: RoutedRequest, exchange: Exchange, mark: bytes) -> None:
        wanted, begun = routed.wanted, None
        form = APIS[wanted.kind].form(wanted.model) if wanted.stream else None
        early = partial(_early_headers, routed)
        relay = EventRelay(exchange, form, self.options.heartbeat_s, early)
        try:
            async with relay.kept_alive():
                begun = await self._begin(routed)
                if begun.head.status == _BAD_REQUEST and is_too_long(begun.whole or b""):
                    self.repeats.failed(mark)
                await pass_on(routed, exchange, relay, begun, _InClear(exchange))
        finally:
            await routed.end(None if begun is None else begun.attempt)

    async def _begin(self, routed: RoutedRequest) -> Begun:
        """Try providers until one has its first token, or all of an answer that is not streamed."""
        while True:
            await routed.place()
            attempt = await routed.send(OwnSeal(routed.wanted))
            try:
                return await routed.first_token(attempt)
            except GONE as error:
                routed.failed(error)
                if not routed.may_try_again:
                    raise no_provider(error) from error


class _InClear:
    """Write an answer as the provider's engine wrote it. ``exchange`` has the form of the API's errors."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def headers(self, routed: RoutedRequest, head: AnswerHead) -> dict[str, str]:
        return {
            "content-type": head.content_type,
            **_early_headers(routed),
            "x-convoy-provider": routed.provider,
        }

    def broken(self) -> bytes:
        text = "the provider failed before the answer was complete"
        return b"".join(map(encode_event, self._exchange.failure(Unavailable(text, public=text))))

    def ending(self, routed: RoutedRequest, head: AnswerHead) -> bytes:
        if not (routed.wanted.stream and head.content_type.startswith("text/event-stream")):
            return b""
        return b": timing " + msgspec.json.encode(routed.timing.us()) + b"\n\n"


def _early_headers(routed: RoutedRequest) -> dict[str, str]:
    """Return the headers that are known before a provider is."""
    return {
        "cache-control": "no-store",
        "x-accel-buffering": "no",
        **routed.timing.header(),
        SEALED_HEADER: "by-coordinator",
    }


def check_known(coordinator: Coordinator, model: str) -> None:
    """Check that ``model`` is served here. Raises `UnknownModel`."""
    if not coordinator.is_known(model):
        raise UnknownModel(
            f"the model {model[:80]!r} is not served here", param="model", code="model_not_found"
        )
