"""Run the HTTP server: bind, serve, drain and end, and handle signals."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from convoy.api.ending import arm_at_second
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.acceptor import Acceptor
from convoy.api.listen.http_limits import HttpLimits
from convoy.api.listen.http_protocol import BoundedHttp, BoundedLogger
from convoy.api.listen.keep_place import keeping_place
from convoy.api.listen.options import ServeOptions
from convoy.api.listen.paths import at_plain_path
from convoy.api.listen.tls import check_certificate, load_certificate
from convoy.errors import ConfigError
from convoy.transport.listen.places import ConnectionSlot, ConnectionSlots

if TYPE_CHECKING:
    from convoy.api.service import Service

_log = logging.getLogger(__name__)


class Stoppable(Protocol):
    """Declare what signals ask of a server. Handlers call it, between any two instructions."""

    def request(self) -> None:
        """Ask the server to drain, or to end at once if it was asked before."""

    def request_reload(self) -> bool:
        """Schedule a fresh read of keys and certificates. Return whether the server has any to read."""


class Stop:
    """Ask a running server to end, from any thread or a signal handler.

    The first request drains the server. The second one ends it at once.
    """

    def __init__(self) -> None:
        # A signal handler may run on the thread that holds this lock.
        self._lock = threading.RLock()
        self._num_requests = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reload: Callable[[], None] | None = None
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        """Ask the server to drain, or to end at once if it was asked before."""
        with self._lock:
            self._num_requests += 1
            event = self.drain if self._num_requests == 1 else self.now
            if self._loop is None:
                event.set()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(event.set)

    def request_now(self) -> None:
        """Ask the server to end at once."""
        self.request()
        self.request()

    def request_reload(self) -> bool:
        """Schedule a fresh read of keys and certificates. Return whether the server has any to read."""
        with self._lock:
            if self._reload is None or self._loop is None or self._loop.is_closed():
                return False
            self._loop.call_soon_threadsafe(self._reload)
            return True

    def attach(self, loop: asyncio.AbstractEventLoop, reload: Callable[[], None] | None = None) -> None:
        """Set events on ``loop`` and call ``reload`` there from now on. Earlier requests still count."""
        with self._lock:
            self._loop = loop
            self._reload = reload


def bind(options: ServeOptions, *, option: str = "--port", step: int = 1) -> socket.socket:
    """Return a listening socket. Raises `ConfigError`, naming host and port, if the address is not available.

    ``option`` is the port's name on the command line. The hint suggests the port ``step`` further on.
    """
    where = f"{options.host}:{options.port}"
    try:
        infos = socket.getaddrinfo(
            options.host.strip("[]"), options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror or error}",
            hint="the host is an address or a name of this machine, such as 127.0.0.1",
        ) from error
    family, kind, protocol, _, address = sorted(infos, key=lambda info: info[0] != socket.AF_INET)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # With SO_REUSEADDR the port is free although old connections linger. A port with a listener is not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {options.port} on {options.host} is taken",
                hint=f"use {option} {(options.port + step - 1) % 65535 + 1}, "
                "or stop the program that listens there",
            ) from error
        raise ConfigError(
            f"cannot listen on {where}: {(error.strerror or str(error)).lower()}",
            hint=f"give --host an address of this machine, and {option} a port that you may listen on",
        ) from error
    return listener


def run_server(
    service: Service,
    options: ServeOptions,
    *,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    on_drain: Callable[[int, float], None] = lambda _answers, _drain_s: None,
    stop: Stop | None = None,
) -> int:
    """Serve until `Stop.request`, SIGTERM or SIGINT (on the main thread), then drain for ``options.drain_s``.

    ``on_ready`` is called with the base URL (``http://127.0.0.1:8000``), on a thread of its own, once
    the server answers requests. An exception from it ends the server. ``on_stop`` is called, also on a
    thread, when a stop is requested; the server still takes requests then. ``on_drain`` is called when the
    server takes no more requests, if answers are under way: with their number and the seconds that they
    have. A second signal ends the server at once. Returns the number of answers that were cut off. Raises
    `ConfigError` before anything is served.
    """
    options.check()
    stop = stop or Stop()
    with bind(options) as listening, signals(stop):
        return serve_on(
            *(listening, service, options, stop), on_ready=on_ready, on_stop=on_stop, on_drain=on_drain
        )


def serve_on(
    listener: socket.socket,
    service: Service,
    options: ServeOptions,
    stop: Stop,
    *,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    on_drain: Callable[[int, float], None] = lambda _answers, _drain_s: None,
) -> int:
    """Serve on a listening socket until ``stop``, as `run_server` does, and handle no signals."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(
            _serve(*(service, options, listener, stop), on_ready=on_ready, on_stop=on_stop, on_drain=on_drain)
        )


async def _serve(
    service: Service,
    options: ServeOptions,
    listener: socket.socket,
    stop: Stop,
    *,
    on_ready: Callable[[str], None] | None,
    on_stop: Callable[[], None],
    on_drain: Callable[[int, float], None],
) -> int:
    lifecycle = Lifecycle()
    # A coordinator and a proxy serve with this module too, and have no use for the modules of a model's API.
    from convoy.api.app import make_app

    app = make_app(service, options, lifecycle)
    server = HttpServer(app, tls=options.tls, limits=options.limits)
    url = url_of(options.host, listener, tls=options.tls is not None)
    ready = None if on_ready is None else partial(on_ready, url)
    _log.info("listening url=%s authenticated=%s", url, options.keys is not None)

    def reload() -> None:
        server.reload_tls()
        if options.keys is not None:
            options.keys.reload()

    return await serve_until_stopped(
        [(server, listener)],
        *(lifecycle, stop, options.drain_s),
        on_ready=ready,
        on_stop=on_stop,
        on_drain=on_drain,
        reload=None if options.keys is None and options.tls is None else reload,
    )


async def serve_until_stopped(
    servers: Sequence[tuple[HttpServer, socket.socket]],
    lifecycle: Lifecycle,
    stop: Stop,
    drain_s: float,
    *,
    on_ready: Callable[[], None] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    on_drain: Callable[[int, float], None] = lambda _answers, _drain_s: None,
    reload: Callable[[], None] | None = None,
) -> int:
    """Serve on every listener until ``stop``, then drain. Return the number of answers that were cut off.

    ``on_ready``, ``on_stop`` and ``on_drain`` are those of `run_server`. SIGHUP calls ``reload``.
    """
    loop = asyncio.get_running_loop()
    stop.attach(loop, reload)
    serving = [loop.create_task(server.serve(sockets=[listener])) for server, listener in servers]
    try:
        for server, _ in servers:
            await first_of(server.ready.wait(), *serving)
        for one in serving:
            # A server that failed, such as for its certificate, is never announced.
            if one.done():
                one.result()
        if on_ready is not None:
            announcing = loop.run_in_executor(None, on_ready)
            await first_of(stop.drain.wait(), *serving, announcing)
            if announcing.done():
                announcing.result()
        await first_of(stop.drain.wait(), *serving)
        await first_of(loop.run_in_executor(None, on_stop), stop.now.wait())
        lifecycle.draining = True
        _log.info("draining drain_s=%g", drain_s)
        if lifecycle.num_answers:
            on_drain(lifecycle.num_answers, drain_s)
        return await drain(lifecycle, stop, drain_s)
    finally:
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        _log.info("closed")


async def drain(lifecycle: Lifecycle, stop: Stop, drain_s: float) -> int:
    """Wait for the last answer, for ``drain_s`` or for a second stop; then cut the answers that still run.

    Returns the number of answers that were cut off.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await first_of(lifecycle.wait_idle(), stop.now.wait())
    return lifecycle.cut()


async def first_of(*awaited: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Wait until one of ``awaited`` is done. Cancel the coroutines that are not done; futures continue."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, one in zip(tasks, awaited, strict=True):
            if task is not one:
                task.cancel()


def _socket_class() -> type[asyncio.Protocol]:
    """Return the WebSocket's protocol. Only the extra fleet brings the library below it."""
    from convoy.api.listen.abortable import AbortableSocket

    return AbortableSocket


class HttpServer(uvicorn.Server):
    """Run uvicorn without its signal handlers, and set an event when the server is up."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_socket_bytes: int = 0,
        tls: tuple[str, str] | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        """Prepare uvicorn's configuration. ``tls`` names the files of the certificate and its key.

        ``max_socket_bytes`` bounds one message of a WebSocket; with 0 the server refuses WebSockets.
        """
        certificate, key = tls or (None, None)
        self._limits = limits or HttpLimits()
        self._log = BoundedLogger()
        self.places = ConnectionSlots(self._limits.fit(), self._limits.header_timeout_s, self._limits.clock)
        config = uvicorn.Config(
            at_plain_path(keeping_place(app)),
            lifespan="off",
            ws=_socket_class() if max_socket_bytes else "none",
            ws_max_size=max_socket_bytes,
            ws_per_message_deflate=False,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._tls = tls
        self.ready = asyncio.Event()

    def reload_tls(self) -> None:
        """Load the certificate again for new connections. A bad certificate is logged and changes nothing."""
        if self._tls is None or self.config.ssl is None:
            return
        try:
            check_certificate(self._tls)
            load_certificate(self.config.ssl, self._tls)
        except ConfigError as error:
            _log.warning("the certificate stays as it was: %s", error.message)
        else:
            _log.info("certificate read again file=%s", self._tls[0])

    def capture_signals(self) -> Any:
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = [self._accept_on(listener) for listener in sockets or ()]  # type: ignore[misc]
        self.started = True
        self.ready.set()

    async def on_tick(self, counter: int) -> bool:
        self.places.expire()
        self._log.limited.flush()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._log.limited.flush(everything=True)

    def _accept_on(self, listener: socket.socket) -> Acceptor:
        return Acceptor(
            listener,
            self.places,
            self._protocol,
            tls=self.config.ssl,
            handshake_s=self._limits.header_timeout_s,
        )

    def _protocol(self, place: ConnectionSlot) -> BoundedHttp:
        return BoundedHttp(
            self.config, self.server_state, {}, limits=self._limits, place=place, log=self._log
        )


@contextmanager
def signals(stop: Stoppable) -> Iterator[None]:
    """Handle signals inside this block. On other threads than the main one nothing changes.

    SIGTERM and SIGINT request a stop. From the second one on, the process ends within `ending.END_S`,
    whatever its threads do. SIGHUP reads keys and certificates again. If the terminal has gone, or if there
    is nothing to read, SIGHUP requests a stop too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    arm = arm_at_second()

    def asked(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stop.request()
        arm()

    terminal = next((number for number in range(3) if _is_terminal(number)), None)

    def hung_up(number: int, frame: FrameType | None) -> None:
        closed = terminal is not None and not _is_terminal(terminal)
        if closed or not stop.request_reload():
            asked(number, frame)

    handlers = {signal.SIGTERM: asked, signal.SIGINT: asked, signal.SIGHUP: hung_up}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's event loop factory, or asyncio's if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def url_of(host: str, listener: socket.socket, *, tls: bool = False) -> str:
    """Return the base URL of a listener, with a loopback address in place of a wildcard."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - shown, not bound
    if ":" in shown and not shown.startswith("["):
        shown = f"[{shown}]"
    return f"{'https' if tls else 'http'}://{shown}:{port}"
