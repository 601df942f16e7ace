"""Seal the requests of a user's tools, on the user's machine, to a provider that the user trusts.

The coordinator learns the model, sizes, times and the account. If no trusted provider is connected, nothing
is sent, unless plain requests are allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convoy.api.anthropic.problem import VERSION_HEADER
from convoy.api.body.read_body import read_body
from convoy.api.chat.resume import refuse_to_resume
from convoy.api.exchange import Exchange
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.traces import NO_TRACES, Traces
from convoy.config.table import FLEET_ANSWER_TOKENS
from convoy.crypto.sealed.request import request_hash, seal_request, sealed_size
from convoy.errors import SealError, Unavailable
from convoy.fleet.answer import MAX_WHOLE_BYTES, SEALED_HEADER, AnswerHead
from convoy.fleet.apis.table import APIS
from convoy.fleet.consumer_request import ConsumerRequest, ModelOptions, read_consumer_request
from convoy.fleet.event_relay import EVENT_STREAM, EventRelay
from convoy.fleet.lease import Lease, LeaseAsked, facts_of
from convoy.fleet.proxy.answer import AnswerReader
from convoy.fleet.proxy.client import (
    CoordinatorClient,
    ProxyRefusal,
    SealedAnswer,
    bounded,
    pieces,
    suspect,
)
from convoy.fleet.proxy.metrics import ProxyCounts
from convoy.fleet.proxy.trace_span import ProxySpan, proxied
from convoy.fleet.proxy.trust import LeaseCheck, Trust, Untrusted
from convoy.wire.fleet.messages import Kind

_log = logging.getLogger(__name__)
_KEY_S = 24 * 3600
_NO_STORE = {"cache-control": "no-store", "x-accel-buffering": "no"}
# Headers that name the provider that answers, and the level that it proved.
_Who = dict[str, str]


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """Hold a proxy's options.

    ``default_max_tokens`` is for a request that names none. The proxy does not ask the coordinator for its
    default.
    """

    trust: Trust
    allow_plain: bool = False
    default_max_tokens: int = FLEET_ANSWER_TOKENS
    max_attempts: int = 6
    # Of an answer that is not streamed.
    max_whole_bytes: int = MAX_WHOLE_BYTES
    traces: Traces = NO_TRACES


class Tags:
    """Name the beginnings of prompts under a key that lives a day.

    No other machine can make or try a name.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._key, self._made_s = secrets.token_bytes(32), now()

    def of(self, label: str, data: bytes) -> bytes:
        """Return a name of 32 bytes."""
        if self._now() - self._made_s > _KEY_S:
            self._key, self._made_s = secrets.token_bytes(32), self._now()
        return hmac.digest(self._key, label.encode() + b"\n" + data, hashlib.sha256)


class Proxy:
    """Answer the requests of tools. Lives on one event loop."""

    def __init__(self, client: CoordinatorClient, options: ProxyOptions) -> None:
        self.client = client
        self.options = options
        self._leases = LeaseCheck(options.trust)
        self._tags = Tags()
        self._cache_key = secrets.token_bytes(32)
        self.counts = ProxyCounts()

    async def answer(
        self,
        data: bytes,
        kind: Kind,
        idempotency_key: str | None,
        exchange: Exchange,
        *,
        parent: str = "",
        heartbeat_s: float = 5.0,
    ) -> None:
        """Answer a request sealed, or not at all.

        It is sent plain only if that is allowed and no provider is trusted.

        ``parent`` is a traceparent of the tool. A stream is silent for at most ``heartbeat_s``.
        """
        wanted = self._wanted(data, kind)
        form = APIS[kind].form(wanted.model) if wanted.stream else None
        relay = EventRelay(exchange, form, heartbeat_s, lambda: dict(_NO_STORE))
        traces = self.options.traces
        with self.counts.answering(exchange), proxied(traces, kind, parent, exchange) as span:
            async with relay.kept_alive():
                await self._answer(data, wanted, idempotency_key, exchange, relay, span=span)

    async def _answer(
        self,
        data: bytes,
        wanted: ConsumerRequest,
        idempotency_key: str | None,
        exchange: Exchange,
        relay: EventRelay,
        *,
        span: ProxySpan,
    ) -> None:
        hidden = None
        if idempotency_key is not None:
            hidden = self._tags.of("idempotency", idempotency_key.encode()).hex()
        try:
            lease = await self.client.lease(self._asked(wanted), hidden, span.traceparent)
            span.leased(wanted)
            for _ in range(self.options.max_attempts):
                again = await self._try(lease, wanted, exchange, relay, span)
                if again is None:
                    return
                lease = again
                self.counts.resealed += 1
            raise suspect(f"the coordinator gave {self.options.max_attempts} leases, and none was served")
        except Untrusted as error:
            if not self.options.allow_plain or relay.has_answer:
                raise
            _log.warning("sent in plain request=%s: %s", exchange.id, error.message)
            self.counts.plain += 1
            # In clear it is another request than the sealed one, so it gets another key.
            if idempotency_key is not None:
                hidden = self._tags.of("idempotency in plain", idempotency_key.encode()).hex()
            await self._plain(data, wanted, hidden, relay)
        except ProxyRefusal as refusal:
            exchange.outcome = "Refusal"
            headers = {"retry-after": refusal.retry_after} if refusal.retry_after else {}
            said = APIS[wanted.kind].problem(refusal.status, refusal.body.error)
            headers["content-type"] = "application/json"
            await relay.complete(refusal.status, headers, msgspec.json.encode(said))

    def _wanted(self, data: bytes, kind: Kind) -> ConsumerRequest:
        default = ModelOptions(default_max_tokens=self.options.default_max_tokens)
        return read_consumer_request(data, kind, "", _Always(default), self._cache_key)

    def _asked(self, wanted: ConsumerRequest) -> LeaseAsked:
        trust = self.options.trust
        return LeaseAsked(
            model=wanted.model,
            kind=wanted.kind,
            stream=wanted.stream,
            prompt_tokens=_coarse(wanted.prompt_tokens),
            most_prompt_tokens=sealed_size(len(wanted.body)),
            max_tokens=wanted.max_tokens,
            tag=self._tags.of("beginning", wanted.tag),
            body_tag=self._tags.of("body", wanted.kind.encode() + wanted.body),
            providers=sorted(trust.providers),
            operators=sorted(trust.operators),
            level=trust.rules.minimum.text,
        )

    async def _try(
        self, lease: Lease, wanted: ConsumerRequest, exchange: Exchange, relay: EventRelay, span: ProxySpan
    ) -> Lease | None:
        """Return None once the request is answered, or the lease for another try."""
        try:
            verdict = self._leases.check(lease)
        except Untrusted:
            await self.client.release(lease)
            raise
        who = {
            "x-convoy-provider-key": lease.identity.hex(),
            "x-convoy-provider-level": verdict.level.text,
        }
        facts = facts_of(lease, wanted)
        try:
            sealed, secret = seal_request(lease.request_key, facts, wanted.body)
        except SealError as error:
            raise suspect(error.message) from None
        async with self.client.use(lease, sealed) as answer:
            if not isinstance(answer, SealedAnswer):
                return answer
            most = self.options.max_whole_bytes
            reader = AnswerReader(answer.body, secret, request_hash(facts, sealed), max_whole_bytes=most)
            head = await reader.head()
            span.first_token()
            headers = _headers(head, who, answer.timing)
            if head.status == 200 and head.content_type.startswith(EVENT_STREAM):
                await relay.begin(200, headers)
                async for piece in reader.pieces():
                    await relay.send(piece)
                self._compare(reader, exchange)
                await relay.end(_ending(reader))
            else:
                body = await reader.whole()
                self._compare(reader, exchange)
                await relay.complete(head.status, {**headers, **_late_headers(reader)}, body)
        return None

    def _compare(self, reader: AnswerReader, exchange: Exchange) -> None:
        if reader.difference:
            self.counts.usage_differs += 1
            _log.warning("usage differs request=%s: %s", exchange.id, reader.difference)

    async def _plain(
        self, data: bytes, wanted: ConsumerRequest, hidden: str | None, relay: EventRelay
    ) -> None:
        async with self.client.plain(wanted.kind, data, hidden) as response:
            kind = response.headers.get("content-type", "application/json")
            headers = {"content-type": kind, "cache-control": "no-store", SEALED_HEADER: "by-coordinator"}
            if not kind.startswith(EVENT_STREAM):
                body = await bounded(response, self.options.max_whole_bytes)
                await relay.complete(response.status_code, headers, body)
                return
            await relay.begin(response.status_code, headers)
            async for piece in pieces(response):
                await relay.send(piece)
            await relay.end()


class _Always(dict[str, ModelOptions]):
    """Map every model to the same options."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self._options = options

    def get(self, key: str, default: object = None) -> ModelOptions:  # noqa: ARG002
        return self._options


def _headers(head: AnswerHead, who: _Who, timing: dict[str, int]) -> dict[str, str]:
    """Return the headers, none of them the coordinator's.

    Only the proxy may say that the coordinator was blind, because the proxy made it so.
    """
    return {
        "content-type": head.content_type,
        **_NO_STORE,
        "x-timing": msgspec.json.encode(timing).decode(),
        **who,
        SEALED_HEADER: "end-to-end",
    }


def _ending(reader: AnswerReader) -> bytes:
    """Return the comments after a stream: the times, and the bill if it differs from the sealed counts."""
    end = b": timing " + msgspec.json.encode(reader.us) + b"\n\n"
    return end + (f": usage differs: {reader.difference}\n\n".encode() if reader.difference else b"")


def _late_headers(reader: AnswerReader) -> dict[str, str]:
    """Return the headers that are known once a whole answer is here."""
    headers = {"x-timing": msgspec.json.encode(reader.us).decode()} if reader.us else {}
    return headers | ({"x-convoy-usage-differs": reader.difference} if reader.difference else {})


def _coarse(count: int) -> int:
    """Return ``count`` with only its two highest bits: enough to route by."""
    shift = max(0, count.bit_length() - 2)
    return max(1, count >> shift << shift)


@dataclass(frozen=True, slots=True)
class ProxyAsked:
    """Be the ASGI endpoint for one kind of request."""

    proxy: Proxy
    options: ServeOptions
    lifecycle: Lifecycle
    kind: Kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        headers = Headers(scope=scope)
        refuse_to_resume(headers)
        with self.lifecycle.answering(), self.lifecycle.running(exchange):
            data = await read_body(headers, receive, self.options)
            key, parent = headers.get("idempotency-key"), headers.get("traceparent", "")
            heartbeat_s = self.options.heartbeat_s
            answer = self.proxy.answer(
                *(data, self.kind, key, exchange), parent=parent, heartbeat_s=heartbeat_s
            )
            await exchange.while_connected(answer)


@dataclass(frozen=True, slots=True)
class ProxyModels:
    """Pass on the coordinator's list of models, or one of them."""

    proxy: Proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        name, version = scope["path_params"].get("name", ""), Headers(scope=scope).get(VERSION_HEADER, "")
        status, data = await self.proxy.client.models(name, version=version)
        try:
            body: object = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            text = "the coordinator answers something that is not JSON"
            raise Unavailable(text, public=text) from None
        await exchange.send_json(status if 200 <= status <= 599 else 502, body)
