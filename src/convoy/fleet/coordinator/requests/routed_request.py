"""Take a request through the coordinator, whichever side sealed it: hold, route, send, pass on and settle.

Nothing is written to the client before the first token, so a provider that fails until then is replaced
unseen. After the first token, a stream that breaks ends with an error, and never as if it were complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers
from starlette.websockets import WebSocketDisconnect

from convoy.api.exchange import Exchange
from convoy.api.keys.key_use import RequestUse
from convoy.api.traces import NO_SPAN, TraceSpan, Value
from convoy.crypto.keys import prefixed
from convoy.errors import (
    ConfigError,
    ConvoyError,
    PeerError,
    ProviderError,
    RequestError,
    SealError,
    Unavailable,
)
from convoy.fleet.answer import AnswerHead, is_of_engine
from convoy.fleet.apis.table import APIS
from convoy.fleet.books.keys import Scope as KeyScope
from convoy.fleet.books.ledger import MAX_KEY_CHARS, Bill, Hold
from convoy.fleet.consumer_request import ConsumerRequest, ModelOptions, refused_prompt_tokens
from convoy.fleet.coordinator.bounds import BilledOutcome
from convoy.fleet.coordinator.callers import Consumer, caller_of
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.fleet.coordinator.providers.answering import ProviderFailed
from convoy.fleet.coordinator.requests.attempt import Attempt, Seal
from convoy.fleet.coordinator.requests.trace_span import begin_span, end_span
from convoy.fleet.coordinator.routing.route_request import RouteRequest, Trusted
from convoy.fleet.event_relay import EventRelay
from convoy.fleet.outcomes import outcome_of
from convoy.fleet.timing import SEGMENTS, Timing
from convoy.trust.evidence.level import Level

_log = logging.getLogger(__name__)

_REPORT = "request=%s outcome=%s provider=%s " + " ".join(f"{name}_us=%d" for name in SEGMENTS)
_BODY_LABEL = b"convoy idempotent body v1"
GONE = (ProviderError, SealError, WebSocketDisconnect, RuntimeError)


@dataclass(frozen=True, slots=True)
class Begun:
    """Hold an answer that has its first token.

    ``whole`` is the body of a refusal, or of an answer that is not streamed.
    """

    attempt: Attempt
    head: AnswerHead
    whole: bytes | None


@dataclass(slots=True)
class RoutedRequest:
    """Hold a request and its state. Lives on the event loop's thread."""

    coordinator: Coordinator
    account: str
    wanted: ConsumerRequest
    timing: Timing
    hold: Hold
    ask: RouteRequest | None = None
    provider: str = ""
    tries: int = 0
    # Tries that failed, without providers that were merely full.
    num_failures: int = 0
    is_over: bool = False
    # A sealed body is awaited, and the code that waits for it ends the request.
    is_leased: bool = False
    is_broken: bool = False
    # When the first token came.
    began_s: float = 0.0
    # The least that its provider must have proved here.
    level: Level = Level.NONE
    # The providers that the client would send the request to.
    trusted: Trusted | None = None
    billed: BilledOutcome = field(default_factory=lambda: BilledOutcome(0, 0))
    # The client's traceparent.
    parent: str = ""
    span: TraceSpan = NO_SPAN
    sealed: str = "by-coordinator"
    # The use of the request's API key.
    use: RequestUse | None = None
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def id(self) -> str:
        """Return the request's id in the ledger and in logs."""
        return self.hold.request_id

    @property
    def may_try_again(self) -> bool:
        """Return whether fewer than ``max_attempts`` providers have failed it."""
        return self.num_failures < self.coordinator.options.max_attempts

    async def reserve(self) -> None:
        """Hold the request's worst-case cost. Raises as `Ledger.reserve`; then nothing is held."""
        traces = self.coordinator.options.traces
        self.span = begin_span(traces, self.wanted, self.timing, self.id, self.parent)
        try:
            await self._reserve()
        except BaseException as error:
            self.report(outcome_of(error))
            raise

    async def _reserve(self) -> None:
        with self.timing.measure("reserve"):
            reserving = asyncio.ensure_future(self.coordinator.clerk.reserve(self.hold))
            try:
                await asyncio.shield(reserving)
            except asyncio.CancelledError:
                # The reservation completes whatever the client
                # does. So wait for it, and give back what it held.
                with contextlib.suppress(ConvoyError):
                    await reserving
                    await self.end(None)
                raise

    async def place(self) -> None:
        """Wait until `provider` is the one that the request goes to. Raises as `Coordinator.place`."""
        coordinator, model = self.coordinator, self.wanted.model
        began = time.perf_counter()
        waited = bool(coordinator.waiting(model)) or not coordinator.free_slots(model)
        try:
            if self.ask is None:
                self.ask = self._ask()
                self.provider = await coordinator.place(self.ask)
            else:
                self.provider = await coordinator.place_again(self.ask)
        finally:
            self.timing.add("queue_wait" if waited else "route", time.perf_counter() - began)
        self.tries += 1

    def _ask(self) -> RouteRequest:
        now_s, wanted = time.monotonic(), self.wanted
        is_run = APIS[wanted.kind].generates
        return RouteRequest(
            number=self.coordinator.next_number(),
            account=self.account,
            model=wanted.model,
            prompt_tokens=wanted.prompt_tokens if is_run else refused_prompt_tokens(wanted.prompt_tokens),
            max_tokens=self.wanted.max_tokens,
            arrived_s=now_s,
            deadline_s=now_s + self.coordinator.options.queue.max_wait_s,
            tag=self.wanted.tag,
            trusted=self.trusted,
            level=self.level,
        )

    @property
    def try_id(self) -> str:
        """Return the id of this try. Each try has its own, because a provider opens no id twice."""
        return f"{self.id}-{self.tries}"

    async def send(self, seal: Seal) -> Attempt | None:
        """Send the request to its provider; return None if the provider is gone."""
        try:
            socket = self.coordinator.socket(self.provider)
            attempt = Attempt(socket, seal, self.try_id, self.coordinator.options)
            await attempt.send(self.timing, self.span.traceparent)
        except GONE as error:
            _log.debug("not sent request=%s class=%s", self.id, type(error).__name__)
            return None
        return attempt

    async def first_token(self, attempt: Attempt | None) -> Begun:
        """Wait for the first token. Raises one of ``GONE``; then call `failed`, and try again."""
        if attempt is None:
            raise ProviderFailed("its provider went before it was sent")
        try:
            head = await attempt.head(self.timing)
            if is_of_engine(head.status):
                raise ProviderFailed(f"its provider answers {head.status}", full=head.status in {429, 503})
            self.began_s = time.perf_counter()
            self.timing.reach("first_token")
            assert self.ask is not None, "it was placed"
            self.coordinator.first_token(self.ask)
            streams = self.wanted.stream and head.status == 200
            whole = None if streams else await attempt.whole()
        except BaseException:
            attempt.close()
            raise
        return Begun(attempt, head, whole)

    def failed(self, error: BaseException) -> None:
        """Note that the provider failed, so that `place` finds another."""
        text = error.message if isinstance(error, ConvoyError) else "its socket ended"
        _log.info("provider failed request=%s provider=%s: %s", self.id, self.provider, text)
        self.coordinator.counts.provider_failed(self.provider)
        assert self.ask is not None, "what failed was placed"
        is_full = isinstance(error, ProviderFailed) and error.full
        # A full provider is no failure: the request waits for
        # another slot as any other request does, and as long.
        self.num_failures += not is_full or time.monotonic() >= self.ask.deadline_s
        self.ask = self.coordinator.failed(self.ask)

    async def end(self, attempt: Attempt | None) -> None:
        """Free the slot and settle, once.

        This happens before the last byte, so that a client with the complete answer finds it settled.
        """
        if self.is_over:
            return
        self.is_over = True
        if attempt is not None and attempt.outcome is None:
            attempt.close()
        self._free(attempt)
        with self.at_end:
            bill = self._bill(attempt)
            # A charge must not be lost because the client disconnected meanwhile.
            await asyncio.shield(asyncio.ensure_future(self._settle(bill)))

    def _free(self, attempt: Attempt | None) -> None:
        if self.ask is None:
            return
        # A refusal tells nothing of the provider's rate, and neither does a count.
        generates = APIS[self.wanted.kind].generates
        if attempt is None or attempt.outcome is None or not attempt.tokens or not generates:
            self.coordinator.abandon(self.ask.number)
            return
        self.coordinator.finished(
            self.ask,
            first_s=attempt.first_s,
            output_tokens=max(1, attempt.outcome.completion_tokens),
            decode_s=time.perf_counter() - self.began_s,
        )

    def _bill(self, attempt: Attempt | None) -> Bill | None:
        """Return the bill. A broken answer costs nothing; one that its reader left costs the tokens given."""
        wanted = self.wanted
        if attempt is None or self.is_broken or not (attempt.outcome or attempt.tokens):
            return None
        said = attempt.outcome or BilledOutcome(wanted.prompt_tokens, attempt.tokens)
        self.billed = billed = said.bounded(attempt.most_billed())
        self.coordinator.counts.claimed(self.provider, said, billed)
        if self.use is not None:
            self.use.used(billed.prompt_tokens, 0, billed.completion_tokens)
        price = self.coordinator.options.models.get(wanted.model, ModelOptions()).price
        counts = billed.prompt_tokens, billed.completion_tokens
        return Bill(self.provider, *counts, price.cost(*counts), delivered=attempt.outcome is not None)

    @contextlib.asynccontextmanager
    async def delivering(self) -> AsyncIterator[None]:
        """Wrap the sending of a settled answer's end.

        If the sending fails, a retry with the same Idempotency-Key pays only for the difference.
        """
        try:
            yield
        except BaseException:
            if self.hold.idempotency_key is not None:
                noting = asyncio.ensure_future(self.coordinator.clerk.undelivered(self.id))
                await asyncio.shield(noting)
            raise

    async def _settle(self, bill: Bill | None) -> None:
        if bill is None:
            await self.coordinator.clerk.release(self.id)
        else:
            cost_micro = await self.coordinator.clerk.settle(self.id, bill)
            self.coordinator.counts.billed(
                self.wanted.model,
                bill.provider,
                prompt_tokens=bill.prompt_tokens,
                completion_tokens=bill.completion_tokens,
                cost_micro=cost_micro,
            )

    def report(self, outcome: str) -> None:
        """Log one line per request: counts and times, no text."""
        self.timing.reach("total_e2e")
        _log.info(_REPORT, self.id, outcome, self.provider or "-", *self.timing.us().values())
        is_sealed = self.sealed == "end-to-end"
        self.coordinator.counts.request(
            self.wanted.model, outcome, self.timing, tries=self.tries, is_sealed=is_sealed
        )
        if self.coordinator.options.traces.is_on:
            self._end_span(outcome)

    def _end_span(self, outcome: str) -> None:
        values: dict[str, Value] = {
            "convoy.tries": self.tries,
            "convoy.provider": self.provider,
            "convoy.sealed": self.sealed,
        }
        end_span(self.span, self.timing, self.billed, values, outcome)


class BodyForm(Protocol):
    """Write an answer in the client's form."""

    def headers(self, routed: RoutedRequest, head: AnswerHead) -> dict[str, str]:
        """Return the headers of an answer that begins."""
        ...

    def broken(self) -> bytes:
        """Return the end of an answer that its provider did not end."""
        ...

    def ending(self, routed: RoutedRequest, head: AnswerHead) -> bytes:
        """Return the bytes after the last piece, once the request is settled."""
        ...


async def pass_on(
    routed: RoutedRequest, exchange: Exchange, relay: EventRelay, begun: Begun, form: BodyForm
) -> None:
    """Send the answer to the client, and end the request before the answer's last byte."""
    attempt, head, whole = begun.attempt, begun.head, begun.whole
    if whole is not None:
        await routed.end(attempt)
        # The whole answer is here, and its headers are the last place to tell how long it took.
        routed.timing.reach("total_e2e")
    headers = form.headers(routed, head)
    if whole is not None:
        body = whole + form.ending(routed, head)
        async with routed.delivering():
            await relay.complete(head.status, headers, body)
        return
    try:
        await relay.begin(head.status, headers)
        async for piece in attempt.pieces():
            await relay.send(piece)
    except GONE as error:
        _log.warning("an answer broke request=%s provider=%s", routed.id, routed.provider)
        routed.coordinator.counts.provider_failed(routed.provider)
        assert routed.ask is not None, "it was placed"
        routed.coordinator.failed(routed.ask)
        routed.is_broken = True
        await routed.end(attempt)
        exchange.outcome = type(error).__name__
        await relay.fail(form.broken())
        return
    await routed.end(attempt)
    routed.timing.reach("total_e2e")
    async with routed.delivering():
        await relay.end(form.ending(routed, head))
    exchange.outcome = "complete"


def hold_of(
    coordinator: Coordinator, account: str, wanted: ConsumerRequest, said: bytes, headers: Headers
) -> Hold:
    """Return the amount to hold for a request. ``said`` is the body, or stands for it.

    Raises `RequestError` for an invalid Idempotency-Key, or a request that could cost too much.
    """
    key = headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= MAX_KEY_CHARS and key.isprintable()):
        raise RequestError(
            f"an Idempotency-Key has {len(key)} characters, expected 1 to {MAX_KEY_CHARS} printable ones"
        )
    price = coordinator.options.models.get(wanted.model, ModelOptions()).price
    try:
        amount_micro = price.cost(wanted.most_prompt_tokens, wanted.max_tokens)
    except ConfigError as error:
        # The cost is more than any account could have.
        raise RequestError(error.message, param="max_tokens") from None
    return Hold(
        request_id=f"fleet-{secrets.token_hex(12)}",
        account=account,
        model=wanted.model,
        amount_micro=amount_micro,
        body_mac=None if key is None else _mac(coordinator.options.body_key, account, said),
        idempotency_key=key,
    )


def _mac(key: bytes, account: str, said: bytes) -> bytes:
    """Return a name for a body that reveals neither its content nor that two accounts sent the same body."""
    return hmac.digest(key, prefixed(_BODY_LABEL, account.encode(), said), "sha256")


async def account_of(coordinator: Coordinator, headers: Headers) -> str:
    """Return the account of the request's consumer key. Raises `Unauthenticated` or `Forbidden`."""
    grant = await caller_of(coordinator.directory, headers, KeyScope.CONSUMER)
    assert grant.account is not None, "a consumer's key is of an account"
    return grant.account


@contextlib.asynccontextmanager
async def consuming(coordinator: Coordinator, headers: Headers) -> AsyncIterator[Consumer]:
    """Yield the consumer of a request for an answer. Raises as `account_of`, and `RateLimited`."""
    grant = await caller_of(coordinator.directory, headers, KeyScope.CONSUMER)
    assert grant.account is not None, "a consumer's key is of an account"
    with contextlib.ExitStack() as at_end:
        use = at_end.enter_context(coordinator.key_uses.of(grant).begin())
        yield Consumer(grant.account, grant, use, at_end)


def no_provider(error: BaseException) -> ConvoyError:
    """Return the error for a request that the last try failed."""
    if isinstance(error, PeerError):
        text = "every provider that was tried failed"
        return Unavailable(f"{text}: {error.message}", public=text)
    return Unavailable("every provider that was tried went away", public="every provider went away")
