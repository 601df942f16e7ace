"""From options to a listening server, and from a signal to an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from convoy.errors import ConfigError
from convoy.serve.abortable import AbortableSocket
from convoy.serve.api import make_app
from convoy.serve.lifecycle import Lifecycle
from convoy.serve.options import ServeOptions
from convoy.serve.service import Service

_log = logging.getLogger(__name__)


class Stop:
    """Asks a running server to end, from any thread or a signal handler: first to drain, the second time at
    once.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may come while its own thread holds it
        self._num_requests = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        with self._lock:
            self._num_requests += 1
            event = self.drain if self._num_requests == 1 else self.now
            if self._loop is None:
                event.set()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(event.set)

    def request_now(self) -> None:
        """Both at once."""
        self.request()
        self.request()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From here on events are set on ``loop``; earlier requests count."""
        with self._lock:
            self._loop = loop


def bind(options: ServeOptions, *, option: str = "--port", step: int = 1) -> socket.socket:
    """A listening socket. Raises `ConfigError` naming host and port if they are not to be had.

    ``option`` names the port on the command line, and ``step`` leads to the next that may be free.
    """
    where = f"{options.host}:{options.port}"
    try:
        infos = socket.getaddrinfo(
            options.host.strip("[]"), options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
    family, kind, protocol, _, address = sorted(infos, key=lambda info: info[0] != socket.AF_INET)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A port whose last connections linger is free; one that somebody listens on is not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {options.port} on {options.host} is taken",
                hint=f"{option} {(options.port + step - 1) % 65535 + 1}, or stop what listens there",
            ) from error
        raise ConfigError(
            f"cannot listen on {where}: {(error.strerror or str(error)).lower()}",
            hint=f"--host wants an address of this machine, and {option} one that you may listen on",
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
    requests are answered; what it raises ends the server. ``on_stop`` is called, on a thread too, once a stop
    was asked for and while requests are still taken. ``on_drain`` is called once no more are taken, with
    how many answers are under way, if any, and the seconds they have. A second
    signal ends it at once. Returns how many answers were cut off by then. Raises `ConfigError` before
    anything is served.
    """
    options.check()
    stop = stop or Stop()
    with (
        bind(options) as listening,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
        signals(stop),
    ):
        return runner.run(
            _serve(
                *(service, options, listening, stop), on_ready=on_ready, on_stop=on_stop, on_drain=on_drain
            )
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
    server = HttpServer(make_app(service, options, lifecycle))
    url = url_of(options.host, listener)
    ready = None if on_ready is None else partial(on_ready, url)
    _log.info("listening url=%s authenticated=%s", url, options.api_key is not None)
    return await serve_until_stopped(
        [(server, listener)],
        *(lifecycle, stop, options.drain_s),
        on_ready=ready,
        on_stop=on_stop,
        on_drain=on_drain,
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
) -> int:
    """Serve on every listener until ``stop``, then drain; how many answers were cut off by then.

    ``on_ready``, ``on_stop`` and ``on_drain``: as in `run_server`.
    """
    loop = asyncio.get_running_loop()
    stop.attach(loop)
    serving = [loop.create_task(server.serve(sockets=[listener])) for server, listener in servers]
    try:
        for server, _ in servers:
            await first_of(server.ready.wait(), *serving)
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
    """Until the last answer is out, ``drain_s`` is over or a second stop comes; then cut what is left.

    Returns how many that were.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await first_of(lifecycle.wait_idle(), stop.now.wait())
    return lifecycle.cut()


async def first_of(*awaited: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Until one of them is done; coroutines that are not are cancelled, futures go on."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, one in zip(tasks, awaited, strict=True):
            if task is not one:
                task.cancel()


class HttpServer(uvicorn.Server):
    """uvicorn without its own idea of signals, and with an event when it is up."""

    def __init__(self, app: Any, *, max_socket_bytes: int = 0, tls: tuple[str, str] | None = None) -> None:
        """``max_socket_bytes``: of a WebSocket's message; 0: there are none. ``tls``: certificate and key."""
        certificate, key = tls or (None, None)
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws=AbortableSocket if max_socket_bytes else "none",
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
        self.ready = asyncio.Event()

    def capture_signals(self) -> Any:
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()


@contextmanager
def signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and SIGINT ask for a stop while this lasts; elsewhere than on the main thread nothing is
    changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stop.request()

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def url_of(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - shown, not bound
    if ":" in shown and not shown.startswith("["):
        shown = f"[{shown}]"
    return f"http://{shown}:{port}"
