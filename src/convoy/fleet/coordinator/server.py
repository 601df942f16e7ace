"""Serve a coordinator: consumers and providers on one listener, administrators on another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from convoy.api.anthropic.problem import problem_for
from convoy.api.body.intake import Intake
from convoy.api.guard import Guard
from convoy.api.keys.failed_keys import FailedKeys
from convoy.api.keys.repeats import Repeats
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.http_limits import HttpLimits
from convoy.api.listen.options import ServeOptions
from convoy.api.listen.tls import check_certificate
from convoy.api.page.rights import PageRights
from convoy.api.page.session_endpoints import SessionEndpoints
from convoy.api.server import HttpServer, Stop, bind, loop_factory, serve_until_stopped, signals, url_of
from convoy.api.telemetry.http_counts import HttpCounts
from convoy.cluster.metrics.families import Metric
from convoy.config.clear_text import is_loopback
from convoy.crypto.identity import Identity
from convoy.errors import ConfigError
from convoy.fleet.apis.table import APIS
from convoy.fleet.books.store import Store
from convoy.fleet.coordinator.about import CoordinatorAbout
from convoy.fleet.coordinator.admin import make_admin_app
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.providers.proof import CoordinatorProof, PublicCertificate
from convoy.fleet.coordinator.requests.consume import Consume
from convoy.fleet.coordinator.requests.leases import Leases, MakeLease, ReleaseLease, UseLease
from convoy.wire.fleet.messages import MAX_CHUNK_MESSAGE_BYTES

_log = logging.getLogger(__name__)

# Administrators are few, and their connections use the descriptors that the public listener leaves free.
_ADMIN_LIMITS = HttpLimits(max_unproven=32, max_unproven_per_address=32, max_kept=32)


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Hold the addresses where a coordinator listens.

    ``behind_tls_proxy``: a proxy in front has the certificate that ``public`` has otherwise.
    ``public_certificate`` is the PEM file of the certificate that such a proxy serves with.
    """

    public: ServeOptions
    admin: ServeOptions
    behind_tls_proxy: bool = False
    public_certificate: Path | None = None

    def check(self) -> None:
        """Check that no key or prompt crosses a network in clear text, and that TLS has its files.

        Raises `ConfigError`.
        """
        if self.public.tls is not None:
            check_certificate(self.public.tls)
        if not is_loopback(self.admin.host):
            raise ConfigError(
                f"the administrators' listener must be on loopback, and not on {self.admin.host}",
                hint="listen on 127.0.0.1, and reach it from elsewhere through an SSH tunnel",
            )
        if self.public.in_clear and not self.behind_tls_proxy:
            raise ConfigError(
                f"refusing to listen on {self.public.host} without TLS",
                hint="--tls-certificate and --tls-key, or --behind-tls-proxy where a proxy ends TLS",
            )

    def proof(self, identity: Identity) -> CoordinatorProof:
        """Return what the coordinator proves. Raises `ConfigError` for certificates that cannot be read."""
        tls = self.public.tls
        served = PublicCertificate(Path(tls[0])).hash if tls else b""
        public = None if self.public_certificate is None else PublicCertificate(self.public_certificate)
        return CoordinatorProof(identity, served, public)


def make_public_app(
    coordinator: Coordinator,
    options: ServeOptions,
    lifecycle: Lifecycle,
    counts: HttpCounts,
    failed: FailedKeys,
) -> ASGIApp:
    """Return the app for consumers' HTTP and providers' WebSockets.

    ``counts`` counts requests, and ``failed`` wrong keys.
    """
    rights = PageRights(options)
    about = CoordinatorAbout(coordinator, lifecycle, rights)
    page = SessionEndpoints(rights, "coordinator", needs_key=True, check_key=about.check_key)
    shared = (coordinator, options, lifecycle, Intake(options), Repeats())
    leases = Leases(coordinator)
    routes = [
        Route("/v1/leases", MakeLease(leases, options, lifecycle), methods=["POST"]),
        Route("/v1/leases/{lease}", UseLease(leases, options, lifecycle), methods=["POST"]),
        Route("/v1/leases/{lease}", ReleaseLease(leases), methods=["DELETE"]),
        *(Route(api.path, Consume(*shared, kind), methods=["POST"]) for kind, api in APIS.items()),
        Route("/v1/responses/{id}", about.stored, methods=["GET", "DELETE"]),
        *page.routes(),
        Route("/status", about.status),
        Route("/v1/models", about.models),
        Route("/v1/models/{name:path}", about.model),
        Route("/health", about.health),
    ]
    consumers = counts.around(
        Guard(Router(routes, redirect_slashes=False), options, failed, problem_for, rights), routes
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await consumers(scope, receive, send)
            return
        websocket = WebSocket(scope, receive, send)
        # Only browsers send an Origin: a page of any site can open a WebSocket to this machine.
        if scope["path"] != "/provider" or lifecycle.draining or "origin" in websocket.headers:
            await websocket.close()
            return
        await coordinator.take_provider(websocket)

    return app


def run_coordinator(
    options: CoordinatorOptions,
    listen: ListenOptions,
    store: Store,
    identity: Identity,
    *,
    on_ready: Callable[[str, str, int], None] | None = None,
    on_drain: Callable[[int, float], None] = lambda _answers, _drain_s: None,
    stop: Stop | None = None,
) -> int:
    """Serve until a signal or `Stop.request`, then drain, and return how many answers were cut off.

    ``on_ready`` gets both base URLs and the number of broken requests that got their money back. ``on_drain``
    gets the number of answers in flight once no more are taken, and the seconds that they have. Raises
    `ConfigError` before anything is served, also if another coordinator runs under this name on this
    database.
    """
    listen.check()
    stop = stop or Stop()
    with (
        # The next port is the administrators' listener.
        bind(listen.public, step=10) as public,
        bind(listen.admin, option="--admin-port", step=10) as admin,
        signals(stop),
    ):
        coordinator = Coordinator(options, store, listen.proof(identity))
        store.claim(options.instance)
        released = coordinator.ledger.recover()
        urls = (
            url_of(listen.public.host, public, tls=listen.public.tls is not None),
            url_of(listen.admin.host, admin),
        )

        def ready() -> None:
            if on_ready is not None:
                on_ready(*urls, released)

        with (
            closing(coordinator.clerk),
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            return runner.run(
                _serve(coordinator, listen, [public, admin], stop, on_ready=ready, on_drain=on_drain)
            )


async def _serve(
    coordinator: Coordinator,
    listen: ListenOptions,
    listeners: list[Any],
    stop: Stop,
    *,
    on_ready: Callable[[], None],
    on_drain: Callable[[int, float], None],
) -> int:
    lifecycle, counts, failed = coordinator.lifecycle, HttpCounts(), FailedKeys()
    public = HttpServer(
        make_public_app(coordinator, listen.public, lifecycle, counts, failed),
        max_socket_bytes=MAX_CHUNK_MESSAGE_BYTES,
        tls=listen.public.tls,
        limits=listen.public.limits,
    )

    def served() -> Iterator[Metric]:
        yield from counts.families()
        yield from failed.families()

    admin = HttpServer(make_admin_app(coordinator, listen.admin, served, failed), limits=_ADMIN_LIMITS)

    def drain(num_answers: int, drain_s: float) -> None:
        coordinator.drain()
        on_drain(num_answers, drain_s)

    ticking = asyncio.ensure_future(coordinator.run())
    ticking.add_done_callback(lambda task: None if task.cancelled() else stop.request_now())
    forgetting = asyncio.ensure_future(_forget_keys(coordinator))
    try:
        cut = await serve_until_stopped(
            list(zip((public, admin), listeners, strict=True)),
            *(lifecycle, stop, listen.public.drain_s),
            on_ready=on_ready,
            on_drain=drain,
        )
        if ticking.done():
            # Without the ticking task no deadline would pass, so its error must end the process loudly.
            ticking.result()
        return cut
    finally:
        ticking.cancel()
        forgetting.cancel()


async def _forget_keys(coordinator: Coordinator) -> None:
    """Forget Idempotency-Keys, and HMACs of their bodies, once they are a day old. Runs until cancelled."""
    while True:
        try:
            await asyncio.to_thread(coordinator.ledger.forget_keys)
        except SQLAlchemyError as error:
            _log.warning("old idempotency keys are not forgotten class=%s", type(error).__name__)
        await asyncio.sleep(coordinator.options.forget_every_s)
