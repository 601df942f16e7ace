"""What administrators may ask and do: on a listener of its own, on loopback, with keys of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Literal, ParamSpec, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from convoy.cluster.metric_families import CONTENT_TYPE_LATEST, Source, text_of
from convoy.errors import ConfigError, RequestError
from convoy.fleet.books.keys import Scope
from convoy.fleet.books.price import MAX_MICRO
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.serve.guard import Guard
from convoy.serve.options import ServeOptions
from convoy.serve.refusals import Unauthenticated

_MAX_BODY_BYTES = 64 * 1024
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class NewAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /accounts."""

    name: Name
    credit_micro: Annotated[int, msgspec.Meta(ge=0, le=MAX_MICRO)] = 0


class NewCredit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /credits."""

    account: Name
    amount_micro: Annotated[int, msgspec.Meta(ge=1, le=MAX_MICRO)]


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /keys. ``account`` is null for all but a consumer's."""

    scope: Literal["consumer", "admin", "metrics"]
    account: Name | None = None
    label: Annotated[str, msgspec.Meta(max_length=64)] = ""


class OldKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /keys/revoke: those of an account that begin so."""

    hint: Annotated[str, msgspec.Meta(min_length=4, max_length=4)]
    account: Name | None = None


class NewProvider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /providers."""

    identity: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    name: Name


class OldProvider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /providers/revoke."""

    name: Name


def make_admin_app(coordinator: Coordinator, options: ServeOptions, served: Source = tuple) -> ASGIApp:
    """The ASGI application; every path but /metrics wants an administrator's key.

    ``served``: what the consumers' door counts.
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
    return Guard(Router(routes, redirect_slashes=False), options)


class _Admin:
    """Each method is one path's."""

    def __init__(self, coordinator: Coordinator, served: Source) -> None:
        self._coordinator = coordinator
        self._served = served

    async def status(self, request: Request) -> Response:
        await self._admit(request)
        coordinator = self._coordinator
        models = [
            {
                "model": model,
                "providers": coordinator.num_providers(model),
                "free_slots": coordinator.free_slots(model),
                "waiting": coordinator.waiting(model),
            }
            for model in coordinator.models()
        ]
        return _json(
            {
                "coordinator_key": coordinator.public_key.hex(),
                "draining": coordinator.lifecycle.draining,
                "models": models,
                "providers": [asdict(one) for one in coordinator.providers()],
            }
        )

    async def metrics(self, request: Request) -> Response:
        """With a key of its own kind, so that whoever scrapes can do nothing else."""
        await self._admit(request, Scope.METRICS)
        families = list(self._coordinator.families())  # of one moment, on this thread
        text = await asyncio.to_thread(text_of, [lambda: [*families, *self._served()]])
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST, "cache-control": "no-store"})

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
        return _json([{**asdict(one), "scope": one.scope.value} for one in found])

    async def providers(self, request: Request) -> Response:
        await self._admit(request)
        found = await asyncio.to_thread(self._coordinator.directory.providers)
        levels = {one.name: one.level for one in self._coordinator.providers()}
        return _json(
            [{**asdict(one), "identity": one.identity.hex(), "level": levels.get(one.name)} for one in found]
        )

    async def open_account(self, request: Request) -> Response:
        body = await self._body(request, NewAccount)
        await _sensible(self._coordinator.ledger.open_account, body.name)
        if body.credit_micro:
            await _sensible(self._coordinator.ledger.credit, body.name, body.credit_micro)
        return _json({"name": body.name, "balance_micro": body.credit_micro}, 201)

    async def credit(self, request: Request) -> Response:
        body = await self._body(request, NewCredit)
        balance = await _sensible(self._coordinator.ledger.credit, body.account, body.amount_micro)
        return _json({"name": body.account, "balance_micro": balance}, 201)

    async def make_key(self, request: Request) -> Response:
        body = await self._body(request, NewKey)
        scope = Scope(body.scope)
        key = await _sensible(self._coordinator.directory.make_key, scope, body.account, body.label)
        return _json({"key": key, "account": body.account, "scope": scope.value}, 201)

    async def revoke_key(self, request: Request) -> Response:
        body = await self._body(request, OldKey)
        count = await _sensible(self._coordinator.directory.revoke_key, body.account, body.hint)
        return _json({"revoked": count})

    async def approve(self, request: Request) -> Response:
        body = await self._body(request, NewProvider)
        if bytes.fromhex(body.identity) == self._coordinator.public_key:
            raise RequestError(
                "this is the coordinator's own key: who trusts it would trust the coordinator",
                hint="give the provider a folder of keys of its own",
            )
        await _sensible(self._coordinator.directory.approve, bytes.fromhex(body.identity), body.name)
        has_called = self._coordinator.has_called(bytes.fromhex(body.identity))
        return _json({"name": body.name, "has_called": has_called}, 201)

    async def revoke_provider(self, request: Request) -> Response:
        body = await self._body(request, OldProvider)
        known = await _sensible(self._coordinator.directory.revoke_provider, body.name)
        if not known:
            raise RequestError(f"no provider that may connect is called {body.name!r}", param="name")
        connected = await self._coordinator.put_out(body.name)
        return _json({"revoked": known, "was_connected": connected})

    async def _admit(self, request: Request, scope: Scope = Scope.ADMIN) -> None:
        """Raises `Unauthenticated` or `Forbidden`."""
        scheme, _, key = Headers(scope=request.scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(
                "no api key was sent", hint=f"a key of scope {scope.value} is wanted, as a bearer token"
            )
        await asyncio.to_thread(self._coordinator.directory.look_up, key.strip(), scope)

    async def _body(self, request: Request, kind: type[T]) -> T:
        await self._admit(request)
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > _MAX_BODY_BYTES:
                raise RequestError(f"the body has more than {_MAX_BODY_BYTES} bytes")
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"the body is not what this path takes: {error}") from None
        except UnicodeDecodeError:
            raise RequestError("the body is not UTF-8") from None


async def _sensible(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """On a thread; what the database refuses is the administrator's mistake, and said."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except ConfigError as error:
        raise RequestError(error.message, hint=error.hint) from error


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
