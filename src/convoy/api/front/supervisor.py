"""Start the front process, start it again after a crash, and drain it; in the engine's process.

Everything that happens is an event of one queue: signals, reports of the front process, and the ends of the
caller's functions. The main thread takes them in turn.
"""

from __future__ import annotations

import logging
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from convoy.api.front.channel import FrontChannel
from convoy.api.front.convert import from_error
from convoy.api.front.host import MAX_PENDING, EngineHost, FrontReport
from convoy.api.front.setup import FrontSetup, encode_setup, encode_tokenizer
from convoy.api.keys.key_file import new_key
from convoy.api.listen.options import ServeOptions
from convoy.api.server import bind, signals, url_of
from convoy.api.service import Service
from convoy.cluster.children import wait_or_kill
from convoy.errors import Unavailable
from convoy.model.text.tokens import TokenizerDescription
from convoy.wire.front import (
    Drain,
    FrontDraining,
    FrontEnded,
    FrontFailed,
    FrontReady,
    OwnKey,
    Reload,
    Setup,
)

_log = logging.getLogger(__name__)
# Starts in a row that may fail before the first one serves.
_MAX_FAILED_STARTS = 3


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """Hold how the front process is started. The descriptor of its channel follows ``command``.

    After a crash it starts again at once. Each further crash within ``calm_s`` doubles the wait, from
    ``wait_s`` to ``max_wait_s``. It has ``end_s`` beyond the time of a drain to end, and is ended if it
    leaves more than ``max_pending`` messages unread.
    """

    command: Sequence[str]
    wait_s: float = 0.5
    max_wait_s: float = 30.0
    calm_s: float = 60.0
    end_s: float = 10.0
    max_pending: int = MAX_PENDING


@dataclass(frozen=True, slots=True)
class _Reported:
    """Tell of a report of the front process with this host; None is its end."""

    host: EngineHost
    report: FrontReport | None


@dataclass(frozen=True, slots=True)
class _Announced:
    """Tell that the caller's ``on_ready`` has returned, or raised."""

    error: BaseException | None


class _StopRequested:
    """Tell of a signal that asks for the end."""


class _ReloadRequested:
    """Tell of a signal that asks for keys and certificates to be read again."""


class _MayDrain:
    """Tell that the caller's ``on_stop`` has returned."""


_Event = _Reported | _Announced | _StopRequested | _ReloadRequested | _MayDrain


@dataclass(slots=True)
class _Child:
    """Hold a front process, and its host once it serves."""

    process: subprocess.Popen[bytes]
    channel: FrontChannel
    host: EngineHost | None = None
    num_cut: int | None = None
    started_s: float = field(default_factory=time.monotonic)


class FrontServer:
    """Own the front process from its start to its end. Enter it early: the process loads its modules then."""

    def __init__(self, options: FrontOptions, serve: ServeOptions, setup: FrontSetup) -> None:
        self._options = options
        self._serve = serve
        self._setup = encode_setup(setup)
        # A signal handler may put an event at any moment, which this kind of queue allows.
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._child: _Child | None = None
        self._service: Service | None = None
        self._tokenizer = b""
        self._listener: socket.socket | None = None
        self._own_keys: list[OwnKey] = []
        self._was_ready = False
        self._num_stops = 0
        self._drains = False
        self._num_crashes = 0
        self._restart_s: float | None = None
        # When a drain is over at the latest.
        self._end_s: float | None = None

    def __enter__(self) -> Self:
        self._spawn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_child()

    @property
    def pid(self) -> int | None:
        """Return the process id of the present front process, or None between two."""
        return None if self._child is None else self._child.process.pid

    def own_key(self, name: str) -> str | None:
        """Return a new API key for a part of this process, or None if the server asks for no key."""
        if self._serve.keys is None:
            return None
        key = OwnKey(name, new_key())
        self._own_keys.append(key)
        host = None if self._child is None else self._child.host
        if host is not None:
            host.send(key)
        return key.text

    def run(
        self,
        service: Service,
        tokenizer: TokenizerDescription,
        *,
        on_ready: Callable[[str], None],
        on_stop: Callable[[], None],
        on_drain: Callable[[int, float], None],
    ) -> int:
        """Serve until SIGTERM or SIGINT, and drain, as `api.server.run_server` does.

        The three functions are those of `run_server`, and ``tokenizer`` is the model's. Returns the number of
        answers that were cut off.
        """
        self._service, self._tokenizer = service, encode_tokenizer(tokenizer)
        with bind(self._serve) as listener, signals(self):
            self._listener = listener
            url = url_of(self._serve.host, listener, tls=self._serve.tls is not None)
            self._begin()
            while True:
                event = self._next_event()
                if isinstance(event, _Reported) and isinstance(event.report, FrontReady):
                    if not self._was_ready:
                        self._was_ready = True
                        self._on_thread("announce", lambda: on_ready(url), _Announced)
                elif isinstance(event, _Reported) and isinstance(event.report, FrontDraining):
                    on_drain(event.report.num_answers, self._serve.drain_s)
                elif isinstance(event, _StopRequested) and not self._num_stops:
                    self._num_stops += 1
                    self._on_thread("stop", on_stop, lambda _: _MayDrain())
                elif (num_cut := self._handle(event)) is not None:
                    return num_cut

    # What signals ask for: they may interrupt any instruction of the main thread.

    def request(self) -> None:
        """Ask the server to drain, or to end at once if it was asked before."""
        self._events.put(_StopRequested())

    def request_reload(self) -> bool:
        """Schedule a fresh read of keys and certificates. Return whether the server has any to read."""
        if self._serve.keys is None and self._serve.tls is None:
            return False
        self._events.put(_ReloadRequested())
        return True

    # The events.

    def _handle(self, event: _Event | None) -> int | None:
        """Handle an event; None is a time that has come. Return the number of cut answers at the end."""
        match event:
            case None if self._end_s is not None:
                return self._overdue()
            case None:
                self._restart_s = None
                self._spawn()
                self._begin()
            case _Reported(host, report):
                return self._reported(host, report)
            case _Announced(error) if error is not None:
                raise error
            case _StopRequested():
                # The second request: the answers end now, whatever `on_stop` does.
                self._drains = True
                return self._drain(num_times=2)
            case _MayDrain() if not self._drains:
                self._drains = True
                return self._drain(num_times=1)
            case _ReloadRequested():
                self._tell(Reload())
        return None

    def _reported(self, host: EngineHost, report: FrontReport | None) -> int | None:
        child = self._child
        if child is None or child.host is not host:
            return None
        match report:
            case FrontEnded(num_cut):
                child.num_cut = num_cut
                return self._gone(child, host)
            case FrontFailed(error) if not self._was_ready:
                raise from_error(error)
            case FrontFailed(error):
                _log.error("the front process cannot serve: %s", error.message)
            case None:
                return self._gone(child, host)
        return None

    def _gone(self, child: _Child, host: EngineHost) -> int | None:
        """Handle the end of the front process. Only one that was asked for ends the server."""
        num_cut = host.num_running if child.num_cut is None else child.num_cut
        is_young = time.monotonic() - child.started_s < self._options.calm_s
        if host.is_stalled:
            child.process.kill()
        self._end_child()
        if self._drains:
            return num_cut
        wait_s = self._plan_start(is_young=is_young)
        _log.warning(
            "the front process ended: status=%s lost_requests=%d; it starts again in wait_s=%g",
            child.process.returncode,
            num_cut,
            wait_s,
        )
        return None

    def _plan_start(self, *, is_young: bool) -> float:
        """Count a crash, and return the seconds until the next start."""
        self._num_crashes = self._num_crashes + 1 if is_young else 1
        if not self._was_ready and self._num_crashes >= _MAX_FAILED_STARTS:
            raise Unavailable(
                f"the front process ended {self._num_crashes} times before it served",
                hint="its reason is above, in the log; --no-http-process serves without it",
            )
        wait_s = 0.0
        if self._num_crashes > 1:
            wait_s = min(self._options.max_wait_s, self._options.wait_s * 2.0 ** (self._num_crashes - 2))
        self._restart_s = time.monotonic() + wait_s
        return wait_s

    def _overdue(self) -> int:
        """End a front process that has outlasted its drain. Return the number of its requests."""
        child = self._child
        num_cut = 0 if child is None or child.host is None else child.host.num_running
        _log.error("the front process did not end within its drain: lost_requests=%d", num_cut)
        if child is not None:
            child.process.kill()
        self._end_child()
        return num_cut

    def _drain(self, *, num_times: int) -> int | None:
        """Ask the front process to drain. Without one that serves there is nothing to wait for."""
        child = self._child
        if child is None or child.host is None or not self._was_ready:
            return 0
        for _ in range(num_times):
            self._tell(Drain())
        drain_s = self._serve.drain_s if num_times == 1 else 0.0
        self._end_s = time.monotonic() + drain_s + self._options.end_s
        return None

    def _tell(self, message: Drain | Reload) -> None:
        host = None if self._child is None else self._child.host
        if host is not None:
            host.send(message)

    def _next_event(self) -> _Event | None:
        """Return the next event, or None when it is time to start again or to end."""
        due_s = self._restart_s if self._end_s is None else self._end_s
        if due_s is None:
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, due_s - time.monotonic()))
        except queue.Empty:
            return None

    def _on_thread(
        self, name: str, work: Callable[[], None], event: Callable[[BaseException | None], _Event]
    ) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                self._events.put(event(error))
            else:
                self._events.put(event(None))

        threading.Thread(target=run, name=f"front-{name}", daemon=True).start()

    # The process.

    def _spawn(self) -> None:
        """Start the front process. If the system refuses, `_begin` counts a crash."""
        try:
            ours, theirs = socket.socketpair()
            with theirs, ExitStack() as undo:
                undo.callback(ours.close)
                process = subprocess.Popen(
                    [*self._options.command, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    # Standard output belongs to the command.
                    stdout=2,
                )
                undo.pop_all()
        except OSError as error:
            _log.error("the front process cannot start: %s", error.strerror or type(error).__name__)
            return
        self._child = _Child(process, FrontChannel(ours))
        # A process that has gone already is found by `_begin`.
        with suppress(OSError):
            self._child.channel.send(Setup(self._setup))

    def _begin(self) -> None:
        """Let the front process serve."""
        child, service, listener = self._child, self._service, self._listener
        if child is None:
            self._plan_start(is_young=True)
            return
        assert service is not None
        assert listener is not None

        def report(one: FrontReport | None) -> None:
            self._events.put(_Reported(host, one))

        host = EngineHost(child.channel, service, report, self._options.max_pending)
        child.host = host
        try:
            host.start(self._tokenizer, listener.fileno())
        except OSError:
            self._events.put(_Reported(host, None))
            return
        for key in self._own_keys:
            host.send(key)

    def _end_child(self) -> None:
        """End the front process, if there is one, and its requests."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.num_cut is not None:
            # It closes its traces, and ends by itself.
            wait_or_kill(child.process, self._options.end_s)
        if child.host is not None:
            child.host.close()
        else:
            # It may be loading its modules, and has no request.
            child.process.kill()
            child.channel.close()
        wait_or_kill(child.process, self._options.end_s)
