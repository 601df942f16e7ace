"""Serve the administrators' requests, on a listener of its own, on loopback, with keys of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import asdict, fields
from typing import Annotated, Literal, ParamSpec, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from convoy.api.guard import Guard
from convoy.api.keys.failed_keys import FailedKeys
from convoy.api.keys.key_file import new_key
from convoy.api.keys.keys import key_of
from convoy.api.listen.options import ServeOptions
from convoy.cluster.metrics.families import Source, content_type, text_of
from convoy.config.type_resolution import resolved
from convoy.errors import AuditError, ConfigError, RequestError, RosterError, Unavailable
from convoy.fleet.books.directory import Approved
from convoy.fleet.books.keys import KeyFacts, KeyTerms, Scope, hint_of, subject_of_key
from convoy.fleet.books.price import MAX_MICRO
from convoy.fleet.coordinator.callers import caller_of
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.trust.audit import Subject
from convoy.trust.roster.check import check_name

_MAX_BODY_BYTES = 64 * 1024
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_MICRO)] | None


class NewAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe the body of POST /accounts."""

    name: Name
    credit_micro: Annotated[int, msgspec.Meta(ge=0, le=MAX_MICRO)] = 0


class NewCredit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe the body of POST /credits."""

    account: Name
    amount_micro: Annotated[int, msgspec.Meta(ge=1, le=MAX_MICRO)]


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe the body of POST /keys. ``account`` is null for every scope but a consumer's."""

    scope: Literal["consumer", "admin", "metrics"]
    account: Name | None = None
    label: Annotated[str, msgspec.Meta(max_length=64)] = ""
    expires_s: Limit = None
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    concurrent_requests: Limit = None
    spend_limit_micro: Limit = None

    @property
    def terms(self) -> KeyTerms:
        return KeyTerms(**{one.name: getattr(self, one.name) for one in fields(KeyTerms)})


class OldKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe the body of POST /keys/revoke: it revokes the account's keys that begin with ``hint``."""

    hint: Annotated[str, msgspec.Meta(min_length=4, max_length=4)]
    account: Name | None = None


class NewProvider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe the body of POST /providers."""

    identity: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    name: str


class OldProvider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe the body of POST /providers/revoke."""

    name: Name


def make_admin_app(
    coordinator: Coordinator, options: ServeOptions, served: Source = tuple, failed: FailedKeys | None = None
) -> ASGIApp:
    """Return the ASGI application. Every path but /metrics needs an administrator's key.

    ``served`` yields the metrics that the consumers' listener counts. ``failed`` counts wrong keys.
    """
    admin = _Admin(coordinator, served)
    routes = [
        Route("/status", admin.status),
        Route("/metrics", admin.metrics),
        Route("/usage", admin.usage),
        Route("/keys", admin.keys),
        Route("/providers", admin.providers),
        Route("/accounts", admin.accounts),
        Route("/accounts", admin.open_account, methods=["POST"]),
        Route("/credits", admin.credit, methods=["POST"]),
        Route("/keys", admin.make_key, methods=["POST"]),
        Route("/keys/revoke", admin.revoke_key, methods=["POST"]),
        Route("/providers", admin.approve, methods=["POST"]),
        Route("/providers/revoke", admin.revoke_provider, methods=["POST"]),
    ]
    return Guard(Router(routes, redirect_slashes=False), options, failed)


class _Admin:
    """Handle the paths of the administrators' listener, one method a path."""

    def __init__(self, coordinator: Coordinator, served: Source) -> None:
        self._coordinator = coordinator
        self._served = served

    async def status(self, request: Request) -> Response:
        await self._admit(request)
        coordinator = self._coordinator
        models = [
            {
                "model": one.name,
                "providers": one.providers,
                "free_slots": one.free_slots,
                "waiting": one.waiting,
            }
            for one in map(coordinator.model_state, coordinator.models())
        ]
        return _json(
            {
                "coordinator_key": coordinator.proof.public_key.hex(),
                "draining": coordinator.lifecycle.draining,
                "models": models,
                "providers": coordinator.providers(),
                "unapproved": coordinator.approvals.waiting(),
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Return the metrics. They need a key of their own kind, so that a scraper can do nothing else."""
        await self._admit(request, Scope.METRICS)
        # Collect on the event loop's thread, so that all figures
        # are of one moment. Only the formatting is slow.
        families = list(self._coordinator.families())
        text = await asyncio.to_thread(text_of, [lambda: [*families, *self._served()]])
        return Response(text, headers={"content-type": content_type(), "cache-control": "no-store"})

    async def usage(self, request: Request) -> Response:
        await self._admit(request)
        account = request.query_params.get("account")
        found = await asyncio.to_thread(self._coordinator.ledger.usage, account)
        return _json([asdict(one) for one in found])

    async def accounts(self, request: Request) -> Response:
        await self._admit(request)
        found = await asyncio.to_thread(self._coordinator.ledger.balances)
        return _json([{"name": name, "balance_micro": balance} for name, balance in found.items()])

    async def keys(self, request: Request) -> Response:
        await self._admit(request)
        found = await asyncio.to_thread(self._coordinator.directory.keys)
        return _json([_shown(one) for one in found])

    async def providers(self, request: Request) -> Response:
        await self._admit(request)
        found = await asyncio.to_thread(self._coordinator.directory.providers)
        levels, counts = self._coordinator.provider_levels(), self._coordinator.counts
        waiting = self._coordinator.approvals.waiting()
        known = [
            {
                **asdict(one),
                "identity": one.identity.hex(),
                # A provider that was revoked dials again, and waits.
                "state": "waiting" if one.identity.hex() in waiting else _state_of(one, levels),
                "level": levels.get(one.name) if one.revoked_s is None else None,
                "unbilled_tokens": counts.unbilled(one.name),
            }
            for one in found
        ]
        nothing = dict.fromkeys(("name", "approved_s", "revoked_s", "level"))
        strangers = set(waiting) - {one["identity"] for one in known}
        new = [
            {**nothing, "identity": key, "state": "waiting", "unbilled_tokens": 0}
            for key in waiting
            if key in strangers
        ]
        return _json([*known, *new])

    async def open_account(self, request: Request) -> Response:
        body = await self._body(request, NewAccount)
        ledger, credit = self._coordinator.ledger, body.credit_micro
        await self._do(request, "open account", {"account": body.name}, ledger.open_account, body.name)
        if credit:
            about: Subject = {"account": body.name, "amount_micro": credit}
            await self._do(request, "add credit", about, ledger.credit, body.name, credit)
        return _json({"name": body.name, "balance_micro": body.credit_micro}, 201)

    async def credit(self, request: Request) -> Response:
        body = await self._body(request, NewCredit)
        about: Subject = {"account": body.account, "amount_micro": body.amount_micro}
        credit = self._coordinator.ledger.credit
        balance = await self._do(request, "add credit", about, credit, body.account, body.amount_micro)
        return _json({"name": body.account, "balance_micro": balance}, 201)

    async def make_key(self, request: Request) -> Response:
        body = await self._body(request, NewKey)
        scope = Scope(body.scope)
        # The entry is written before the key is, and names it.
        key = new_key()
        about = subject_of_key(key, scope, body.account, body.label, body.terms)
        make = self._coordinator.directory.make_key
        await self._do(request, "make API key", about, make, scope, body.account, body.label, body.terms, key)
        return _json({"key": key, "account": body.account, "scope": scope.value}, 201)

    async def revoke_key(self, request: Request) -> Response:
        body = await self._body(request, OldKey)
        about: Subject = {"account": body.account, "hint": body.hint}
        revoke = self._coordinator.directory.revoke_key
        count = await self._do(request, "revoke API key", about, revoke, body.account, body.hint)
        return _json({"revoked": count})

    async def approve(self, request: Request) -> Response:
        body = await self._body(request, NewProvider)
        try:
            # The name goes into logs and headers as it is.
            check_name(
                body.name, "`convoy coordinator providers --approve KEY alpha` names it alpha", "provider"
            )
        except RosterError as error:
            raise RequestError(error.message, hint=error.hint, param="name") from None
        if bytes.fromhex(body.identity) == self._coordinator.proof.public_key:
            raise RequestError(
                "this is the coordinator's own key: a proxy that trusts it would trust the coordinator",
                hint="give the provider a folder of keys of its own",
            )
        about: Subject = {"name": body.name, "identity": body.identity}
        approve = self._coordinator.directory.approve
        await self._do(request, "approve provider", about, approve, bytes.fromhex(body.identity), body.name)
        self._coordinator.approvals.approve(bytes.fromhex(body.identity))
        has_called = self._coordinator.has_called(bytes.fromhex(body.identity))
        return _json({"name": body.name, "has_called": has_called}, 201)

    async def revoke_provider(self, request: Request) -> Response:
        body = await self._body(request, OldProvider)
        revoke = self._coordinator.directory.revoke_provider
        known = await self._do(request, "revoke provider", {"name": body.name}, revoke, body.name)
        if not known:
            raise RequestError(f"no provider that may connect is called {body.name!r}", param="name")
        connected = await self._coordinator.put_out(body.name)
        return _json({"revoked": known, "was_connected": connected})

    async def _admit(self, request: Request, scope: Scope = Scope.ADMIN) -> None:
        """Check the request's key and count the call.

        Raises `Unauthenticated`, `Forbidden` or `RateLimited`.
        """
        grant = await caller_of(self._coordinator.directory, Headers(scope=request.scope), scope)
        # The call counts against the key's rate. No call here
        # runs long enough to count against its concurrency.
        self._coordinator.key_uses.of(grant).begin()

    async def _do(
        self,
        request: Request,
        action: str,
        subject: Subject,
        work: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Write the action to the audit log, then run ``work`` on a thread and return its result.

        Raises `Unavailable` if the log cannot be written; then ``work`` does not run.
        """
        await self._record(request, action, subject)
        try:
            return await _sensible(work, *args, **kwargs)
        except Exception as error:
            await self._record(request, f"failed: {action}", {**subject, "error": type(error).__name__})
            raise

    async def _record(self, request: Request, action: str, subject: Subject) -> None:
        log = self._coordinator.options.audit
        if log is None:
            return
        actor = f"administrator key {hint_of(key_of(Headers(scope=request.scope)))}"
        origin = "unknown" if request.client is None else request.client.host
        try:
            await asyncio.to_thread(log.append, action, subject, actor=actor, origin=origin)
        except AuditError as error:
            public = "the audit log cannot be written, so nothing was done"
            raise Unavailable(error.message, hint=error.hint, public=public) from error

    async def _body(self, request: Request, kind: type[T]) -> T:
        await self._admit(request)
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > _MAX_BODY_BYTES:
                raise RequestError(f"the body has more than {_MAX_BODY_BYTES} bytes")
        try:
            return msgspec.json.decode(data, type=resolved(kind))
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"the body is not what this path takes: {error}") from None
        except UnicodeDecodeError:
            raise RequestError("the body is not UTF-8") from None


async def _sensible(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run ``work`` on a thread, and turn the `ConfigError` of the database into a `RequestError`."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except ConfigError as error:
        raise RequestError(error.message, hint=error.hint) from error


def _state_of(provider: Approved, connected: Container[str]) -> str:
    if provider.revoked_s is not None:
        return "revoked"
    return "connected" if provider.name in connected else "away"


def _shown(key: KeyFacts) -> dict[str, object]:
    facts = asdict(key)
    return {**facts, **facts.pop("terms"), "scope": key.scope.value}


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
