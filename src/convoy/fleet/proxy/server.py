"""Run a proxy that listens on this machine, until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from convoy.api.anthropic.problem import problem_for
from convoy.api.guard import Guard
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.refusals import UnknownResponse
from convoy.api.server import HttpServer, Stop, bind, loop_factory, serve_until_stopped, signals, url_of
from convoy.api.telemetry.http_counts import HttpCounts
from convoy.api.telemetry.metrics import Metrics
from convoy.config.clear_text import is_loopback
from convoy.errors import ConfigError
from convoy.fleet.apis.table import APIS
from convoy.fleet.proxy.client import CoordinatorClient, check_url
from convoy.fleet.proxy.proxy import Proxy, ProxyAsked, ProxyModels, ProxyOptions


def make_proxy_app(proxy: Proxy, options: ServeOptions, lifecycle: Lifecycle) -> ASGIApp:
    """Return the app with the paths of all APIs, behind the same guard as a head's."""

    async def health(_: Request) -> Response:
        if lifecycle.draining:
            return JSONResponse(_health("draining", "the proxy is shutting down"), 503)
        return JSONResponse(_health("ready", "it listens"))

    async def root(_: Request) -> Response:
        return Response()

    async def stored(_: Request) -> Response:
        raise UnknownResponse("a fleet stores no responses")

    counts = HttpCounts()
    metrics = Metrics((proxy.counts.families, counts.families), lifecycle)
    routes = [
        *(
            Route(api.path, ProxyAsked(proxy, options, lifecycle, kind), methods=["POST"])
            for kind, api in APIS.items()
        ),
        Route("/v1/responses/{id}", stored, methods=["GET", "DELETE"]),
        Route("/", root, methods=["HEAD"]),
        Route("/v1/models", ProxyModels(proxy), methods=["GET"]),
        Route("/v1/models/{name:path}", ProxyModels(proxy), methods=["GET"]),
        Route("/health", health),
        Route("/metrics", metrics.answer),
    ]
    return counts.around(
        Guard(Router(routes, redirect_slashes=False), options, problem_of=problem_for), routes
    )


def _health(status: str, reason: str) -> dict[str, str]:
    """Return the answer of /health. A provider knows a proxy from a coordinator by ``server``."""
    return {"status": status, "reason": reason, "server": "proxy"}


def run_proxy(
    coordinator: str,
    api_key: str,
    proxy_options: ProxyOptions,
    options: ServeOptions,
    *,
    on_ready: Callable[[str], None] | None = None,
    on_drain: Callable[[int, float], None] = lambda _answers, _drain_s: None,
    stop: Stop | None = None,
) -> int:
    """Serve until a signal or `Stop.request`, and return how many answers were cut off.

    ``on_drain`` is as that of `run_server`. Raises `ConfigError` before anything is served: the text is in
    clear between the tools and the proxy, so it listens on loopback only; and without a trusted key it could
    do nothing.
    """
    check_url(coordinator)
    trust = proxy_options.trust
    if not is_loopback(options.host):
        raise ConfigError(
            f"a proxy listens on loopback alone, and not on {options.host}",
            hint="run a proxy on each machine that has tools",
        )
    if not (trust.providers or trust.operators or proxy_options.allow_plain):
        raise ConfigError(
            "this proxy trusts no key, and would refuse every request",
            hint="name a key: --trust-provider HEX or --trust-operator HEX",
        )
    stop = stop or Stop()
    with bind(options) as listener, signals(stop):
        url = url_of(options.host, listener)

        async def serve() -> int:
            lifecycle = Lifecycle()
            client = CoordinatorClient(coordinator, api_key)
            app = make_proxy_app(Proxy(client, proxy_options), options, lifecycle)
            server = HttpServer(app, limits=options.limits)
            try:
                return await serve_until_stopped(
                    [(server, listener)],
                    *(lifecycle, stop, options.drain_s),
                    on_ready=None if on_ready is None else lambda: on_ready(url),
                    on_drain=on_drain,
                )
            finally:
                await client.close()

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve())
