"""Serve proxies: a lease for a request that the coordinator cannot read, and then its sealed body.

A lease holds money in the ledger and a slot at a provider. Both are given back if no body comes in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convoy.api.body.read_body import read_body
from convoy.api.exchange import Exchange
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.refusals import UnknownPath
from convoy.crypto.sealed.request import MAX_SEALED_BYTES, most_body_bytes
from convoy.errors import ProviderError, QueueFull, RequestError
from convoy.fleet.coordinator.callers import Consumer
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.fleet.coordinator.providers.answering import ProviderFailed
from convoy.fleet.coordinator.requests.attempt import LEASE_S, Attempt
from convoy.fleet.coordinator.requests.blind import AsRecords, PassedOn
from convoy.fleet.coordinator.requests.consume import check_known
from convoy.fleet.coordinator.requests.routed_request import (
    GONE,
    RoutedRequest,
    account_of,
    consuming,
    hold_of,
    no_provider,
    pass_on,
)
from convoy.fleet.coordinator.routing.route_request import Trusted
from convoy.fleet.event_relay import EventRelay
from convoy.fleet.lease import (
    MAX_LEASE_BYTES,
    SEALED_TYPE,
    Lease,
    Reseal,
    least_prompt_tokens,
    read_lease_asked,
)
from convoy.fleet.outcomes import outcome_of
from convoy.fleet.timing import Timing
from convoy.trust.evidence.level import Level


class Leases:
    """Hold the leases that wait for their bodies, on the event loop's thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._awaited: dict[str, tuple[RoutedRequest, Lease, asyncio.TimerHandle]] = {}
        # Each keeps the coordinator from ending before its lease does.
        self._kept: dict[str, contextlib.ExitStack] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def check_room(self, account: str) -> None:
        """Check that the account may have one more lease. Raises `QueueFull`."""
        count = sum(routed.account == account for routed, _, _ in self._awaited.values())
        if count >= self.coordinator.options.max_leases:
            text = f"{count} leases of this account wait for their bodies"
            raise QueueFull(text, public=text, retry_after_s=self.coordinator.options.lease_use_s)

    async def offer(self, routed: RoutedRequest) -> Lease:
        """Return a lease of a provider that is free.

        Raises as `Coordinator.place`, and if all providers failed.
        """
        while True:
            await routed.place()
            try:
                socket = self.coordinator.socket(routed.provider)
            except ProviderError as error:
                routed.failed(error)
                if not routed.may_try_again:
                    raise no_provider(error) from error
                continue
            registration = socket.registration
            assert registration is not None, "requests go to providers that registered"
            return Lease(
                *(f"lease-{secrets.token_hex(16)}", routed.try_id, int(time.time()) + LEASE_S),
                *(registration.name, registration.identity, registration.request_key),
                *(registration.request_key_expires_s, registration.key_signature, registration.certificate),
                socket.evidence,
            )

    def keep(self, routed: RoutedRequest, lease: Lease) -> None:
        """Hold a lease until `take`, or until its time is over."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.coordinator.options.lease_use_s, self._ran_out, lease.lease)
        self._awaited[lease.lease] = routed, lease, timer
        stack = self._kept[lease.lease] = contextlib.ExitStack()
        stack.enter_context(self.coordinator.lifecycle.answering(admitted=True))
        routed.is_leased = True

    def is_awaited(self, name: str) -> bool:
        """Return whether a body may come for the lease."""
        return name in self._awaited

    def take(self, name: str, account: str) -> tuple[RoutedRequest, Lease]:
        """Return a lease, once.

        Raises `UnknownPath` for the lease of another account, as for an unknown one.
        """
        routed, lease, timer = self._awaited.get(name, (None, None, None))
        if routed is None or lease is None or timer is None or routed.account != account:
            raise UnknownPath("there is no such lease, or it was used, or its time is over")
        del self._awaited[name]
        timer.cancel()
        self._kept.pop(name).close()
        routed.is_leased = False
        return routed, lease

    def _ran_out(self, name: str) -> None:
        routed, _, _ = self._awaited.pop(name)
        self._kept.pop(name).close()
        task = asyncio.ensure_future(give_back(routed, "lease not used"))
        # The event loop holds only weak references to tasks.
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def give_back(routed: RoutedRequest, outcome: str) -> None:
    """Release what a request holds: it was never sent, or it failed."""
    await routed.end(None)
    routed.report(outcome)


@dataclass(frozen=True, slots=True)
class MakeLease:
    """Handle POST /v1/leases."""

    leases: Leases
    options: ServeOptions
    lifecycle: Lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        parts = self.leases.coordinator.options.traces.is_on
        timing, headers = Timing(parts=parts), Headers(scope=scope)
        exchange.refusal_headers = timing.header
        with self.lifecycle.answering(), self.lifecycle.running(exchange):
            limits = replace(self.options, max_body_bytes=MAX_LEASE_BYTES)
            async with consuming(self.leases.coordinator, headers) as consumer:
                data = await read_body(headers, receive, limits)
                await exchange.while_connected(self._run(consumer, data, headers, exchange, timing))

    async def _run(
        self, consumer: Consumer, data: bytes, headers: Headers, exchange: Exchange, timing: Timing
    ) -> None:
        account, use = consumer.account, consumer.use
        coordinator = self.leases.coordinator
        with timing.measure("parse"):
            asked = read_lease_asked(data)
            wanted = asked.wanted(account)
            check_known(coordinator, wanted.model)
            hold = hold_of(coordinator, account, wanted, asked.said, headers)
            hold = replace(hold, spends=consumer.grant.spends)
            use.hold(wanted.prompt_tokens, 0)
        self.leases.check_room(account)
        trusted = Trusted(frozenset(asked.providers), frozenset(asked.operators))
        routed = RoutedRequest(
            *(coordinator, account, wanted, timing, hold),
            trusted=trusted,
            level=Level.from_text(asked.level),
            parent=headers.get("traceparent", ""),
            sealed="end-to-end",
            use=use,
        )
        await routed.reserve()
        # The lease keeps its place in the key's limits until the request is over.
        routed.at_end = consumer.at_end.pop_all()
        try:
            lease = await self.leases.offer(routed)
            # Other leases of this account may have been made meanwhile.
            self.leases.check_room(account)
        except BaseException as error:
            await give_back(routed, outcome_of(error))
            raise
        # If the answer reaches no proxy, the lease runs out by itself.
        self.leases.keep(routed, lease)
        await exchange.send_json(200, lease)


@dataclass(frozen=True, slots=True)
class UseLease:
    """Handle POST /v1/leases/{lease}: the sealed body."""

    leases: Leases
    options: ServeOptions
    lifecycle: Lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        headers, name = Headers(scope=scope), scope["path_params"]["lease"]
        awaited = self.leases.is_awaited(name)
        with self.lifecycle.answering(admitted=awaited), self.lifecycle.running(exchange):
            account = await account_of(self.leases.coordinator, headers)
            routed, lease = self.leases.take(name, account)
            try:
                limits = replace(self.options, max_body_bytes=MAX_SEALED_BYTES)
                sealed = await read_body(headers, receive, limits, SEALED_TYPE)
                await exchange.while_connected(self._run(routed, lease, sealed, exchange))
            except BaseException as error:
                exchange.outcome = outcome_of(error)
                raise
            finally:
                if not routed.is_leased:
                    # Does nothing if the request is over already.
                    await routed.end(None)
                    routed.report(exchange.outcome)

    async def _run(self, routed: RoutedRequest, lease: Lease, sealed: bytes, exchange: Exchange) -> None:
        if len(sealed) > routed.wanted.most_prompt_tokens:
            raise RequestError(
                f"a sealed body of {len(sealed)} bytes for at most {routed.wanted.most_prompt_tokens} tokens"
            )
        # A client that leaves pays for the prompt too, and
        # for no fewer tokens than the sealed body must hold.
        least = least_prompt_tokens(len(sealed))
        routed.wanted = replace(
            routed.wanted,
            prompt_tokens=max(routed.wanted.prompt_tokens, least),
            body_bytes=most_body_bytes(len(sealed)),
        )
        attempt: Attempt | None = None
        try:
            attempt = await routed.send(PassedOn(lease, routed.wanted, sealed))
            begun = await routed.first_token(attempt)
        except GONE as error:
            if isinstance(error, ProviderFailed) and error.refused:
                # A proxy that seals nonsense must not make a provider look broken to all others.
                text = "the provider does not take the sealed body"
                raise RequestError(f"{text}: {error.message}", code="sealed_body_refused") from error
            routed.failed(error)
            if not routed.may_try_again:
                raise no_provider(error) from error
            another = await self.leases.offer(routed)
            self.leases.keep(routed, another)
            exchange.outcome = "resealed"
            await exchange.send_json(409, Reseal(another))
            return
        try:
            await pass_on(routed, exchange, EventRelay(exchange), begun, AsRecords(lease.request_id))
            exchange.outcome = exchange.outcome or "complete"
        finally:
            await routed.end(begun.attempt)


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Handle DELETE /v1/leases/{lease}: the proxy does not want the lease, or does not trust its provider."""

    leases: Leases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        account = await account_of(self.leases.coordinator, Headers(scope=scope))
        routed, _ = self.leases.take(scope["path_params"]["lease"], account)
        with contextlib.suppress(asyncio.CancelledError):
            await give_back(routed, "lease released")
        await exchange.send_json(200, {})
