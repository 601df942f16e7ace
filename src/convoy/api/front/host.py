"""Run the requests of one front process on the engine, in the engine's process.

Two threads serve the channel. One reads messages. The other writes, so that the engine's thread never waits
for a socket: it appends an output, and all outputs of a step leave in one message.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from convoy.api.front.channel import FrontChannel
from convoy.api.front.convert import from_grammar, from_request, to_error, to_frames
from convoy.api.front.families import encode_families
from convoy.api.problem import log_internal_error
from convoy.api.service import Handle, Service
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output
from convoy.engine.requests.request import AnswerGrammar
from convoy.errors import ConvoyError, FrameError, RequestError
from convoy.wire.front import (
    Abort,
    Ask,
    BeginServing,
    CallReply,
    Compile,
    EngineState,
    FromEngine,
    FromFront,
    FrontDraining,
    FrontEnded,
    FrontFailed,
    FrontReady,
    GrammarFields,
    Pull,
    Question,
    Submit,
    decode_from_front,
    submit_number,
)

_log = logging.getLogger(__name__)
# How often a change of the room or of the level is told.
_STATE_S = 0.5
# Calls that may wait: grammars, and questions about the cluster. Threads are made when they are needed.
_MAX_THREADS = 32
# Messages and outputs that may wait for a front process. One that reads takes them many times a second.
MAX_PENDING = 1 << 18
# How long the end of both threads is waited for. Nothing holds them up once the channel is closed.
_END_S = 5.0

FrontReport = FrontReady | FrontDraining | FrontEnded | FrontFailed


@dataclass(slots=True)
class _Running:
    """Hold a request that runs. ``unfinished`` counts its choices, and ``handle`` is None during `submit`."""

    unfinished: int
    handle: Handle | None = None


class EngineHost:
    """Serve the only model of a service to one front process."""

    def __init__(
        self,
        channel: FrontChannel,
        service: Service,
        report: Callable[[FrontReport | None], None],
        max_pending: int = MAX_PENDING,
    ) -> None:
        """Prepare the calls. ``report`` gets the front's reports on a thread, and None at its end.

        If more than ``max_pending`` messages and outputs wait, the channel is ended.
        """
        (self._model,) = service.models
        self._service = service
        self._channel = channel
        self._report = report
        self._wake = threading.Condition()
        # Messages and outputs in the order in which they leave.
        self._pending: list[FromEngine | tuple[int, Output]] = []
        self._running: dict[int, _Running] = {}
        self._max_pending = max_pending
        self._stalled = False
        self._closed = False
        self._state = self._present_state()
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="front-call")
        # Slow grammars delay no answer about the cluster's health.
        self._questions = ThreadPoolExecutor(1, thread_name_prefix="front-ask")
        self._threads: list[threading.Thread] = []

    @property
    def num_running(self) -> int:
        """Return the number of requests that run for this front process."""
        with self._wake:
            return len(self._running)

    @property
    def is_stalled(self) -> bool:
        """Return whether the channel was ended because the front process did not read."""
        return self._stalled or self._channel.is_stalled

    def start(self, tokenizer: bytes, listener: int) -> None:
        """Let the front process serve on the listening socket with this descriptor, and wait for nothing.

        ``tokenizer`` is that of `setup.encode_tokenizer`. Raises `OSError` without a free descriptor.
        """
        model, state = self._model, self._state
        begin = BeginServing(model.name, model.created, tokenizer, state.room, state.level)
        # The caller may close its own while the message waits.
        handed = socket.socket(fileno=os.dup(listener))
        self._threads = [
            threading.Thread(target=self._read, name="front-read", daemon=True),
            threading.Thread(target=self._write, args=(begin, handed), name="front-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: FromEngine) -> None:
        """Queue a message for the front process."""
        self._append(message)

    def close(self) -> None:
        """End the channel, and abort the requests that still run."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            left = [one.handle for one in self._running.values() if one.handle is not None]
            self._running.clear()
        self._channel.close()
        for handle in left:
            handle.abort()
        for pool in (self._pool, self._questions):
            pool.shutdown(wait=False, cancel_futures=True)
        # A thread that still ran when the interpreter ends, and logged just then, would abort the process.
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_END_S)

    # The reading thread.

    def _read(self) -> None:
        try:
            while (payload := self._channel.receive()) is not None:
                self._take(payload)
        except FrameError as error:
            _log.error("the front process is ended: %s", error.message)
        except Exception as error:  # noqa: BLE001 - its text may hold a prompt
            log_internal_error(_log, "-", error)
        self._report(None)

    def _take(self, payload: bytearray) -> None:
        try:
            message = decode_from_front(payload)
        except FrameError:
            number = submit_number(payload)
            if number is None:
                raise
            # A request beyond the bounds of a message ends alone.
            error = RequestError("the request has a value beyond the bounds of a message")
            self._append(CallReply(number, error=to_error(error)))
        else:
            self._handle(message)

    def _handle(self, message: FromFront) -> None:
        match message:
            case Submit(number, request) if request.grammar is None:
                self._answer(number, partial(self._submit, message))
            case Submit(number):
                # A grammar that wore out or left the cache is compiled once more.
                self._call(self._pool, number, partial(self._submit, message))
            case Abort(number):
                self._abort(number)
            case Compile(number, grammar):
                self._call(self._pool, number, partial(self._compile, grammar))
            case Ask(number, question):
                self._call(self._questions, number, partial(self._ask, question))
            case Pull(number, name):
                self._call(self._questions, number, partial(self._pull, name))
            case _:
                self._report(message)

    def _call(self, pool: ThreadPoolExecutor, number: int, work: Callable[[], object]) -> None:
        # The pool refuses work once the front process has gone, and nothing waits for the answer then.
        with suppress(RuntimeError):
            pool.submit(self._answer, number, work)

    def _answer(self, number: int, work: Callable[[], object]) -> None:
        try:
            body = work()
        except Exception as error:  # noqa: BLE001 - the caller in the front process gets it
            if not isinstance(error, ConvoyError):
                log_internal_error(_log, "-", error)
            self._append(CallReply(number, error=to_error(error)))
        else:
            self._append(CallReply(number, body if isinstance(body, bytes) else b""))

    def _submit(self, message: Submit) -> None:
        number, fields = message.number, message.request
        grammar = None if fields.grammar is None else self._compile(fields.grammar)
        request = from_request(fields, grammar)
        running = _Running(request.num_choices)
        with self._wake:
            self._running[number] = running
        try:
            handle = self._model.engine.submit(request, partial(self._deliver, number))
        except BaseException:
            with self._wake:
                self._running.pop(number, None)
            raise
        with self._wake:
            running.handle = handle
            is_late = self._closed
        if is_late:
            handle.abort()

    def _abort(self, number: int) -> None:
        with self._wake:
            running = self._running.get(number)
        if running is not None and running.handle is not None:
            running.handle.abort()

    def _compile(self, fields: GrammarFields) -> AnswerGrammar:
        named = {"caller": fields.caller, "owner": fields.owner}
        return self._model.grammars.compile(from_grammar(fields), fields.param, **named)

    def _ask(self, question: Question) -> bytes:
        match question:
            case "health":
                return msgspec.json.encode(self._service.health())
            case "status":
                return msgspec.json.encode(self._service.status())
            case "metrics":
                return encode_families(family for source in self._service.metrics for family in source())

    def _pull(self, name: str) -> None:
        puller = self._service.puller
        if puller is None:
            raise RequestError("this head pulls no models")
        if name:
            puller.start(name)
        else:
            puller.stop()

    # The engine's thread.

    def _deliver(self, number: int, output: Output) -> None:
        with self._wake:
            running = self._running.get(number)
            if running is None:
                return
            running.unfinished -= isinstance(output, FinishOutput)
            if isinstance(output, ErrorOutput) or not running.unfinished:
                del self._running[number]
        self._append((number, output))

    def _append(self, one: FromEngine | tuple[int, Output]) -> None:
        with self._wake:
            if self._stalled:
                return
            self._pending.append(one)
            # Wake the writer once for all that waits.
            if len(self._pending) == 1:
                self._wake.notify()
            if len(self._pending) <= self._max_pending:
                return
            self._stalled = True
            self._pending.clear()
        _log.error("the front process is ended: it does not read: max_pending=%d", self._max_pending)
        # The reading thread reports it.
        self._channel.close()

    # The writing thread.

    def _write(self, begin: BeginServing, listener: socket.socket) -> None:
        try:
            with listener:
                self._channel.send(begin, listener.fileno())
            self._write_pending()
        except TimeoutError:
            _log.error("the front process is ended: it does not read: a message waited for too long")
        except OSError:
            # The front process has gone; the reading thread reports it.
            return
        except FrameError as error:
            _log.error("the front process is ended: %s", error.message)
            self._channel.close()
        except Exception as error:  # noqa: BLE001 - its text may hold an answer
            log_internal_error(_log, "-", error)
            self._channel.close()

    def _write_pending(self) -> None:
        told_s = time.monotonic()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._closed, timeout=_STATE_S)
                pending, self._pending = self._pending, []
                if self._closed:
                    return
            self._send_all(pending)
            if time.monotonic() - told_s >= _STATE_S:
                told_s = time.monotonic()
                self._tell_state()

    def _send_all(self, pending: list[FromEngine | tuple[int, Output]]) -> None:
        outputs: list[tuple[int, Output]] = []
        for one in pending:
            if isinstance(one, tuple):
                outputs.append(one)
                continue
            self._send_outputs(outputs)
            outputs = []
            self._channel.send(one)
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: list[tuple[int, Output]]) -> None:
        for frame in to_frames(outputs):
            self._channel.send(frame)

    def _tell_state(self) -> None:
        state = self._present_state()
        if state != self._state:
            self._state = state
            self._channel.send(state)

    def _present_state(self) -> EngineState:
        level = self._service.level
        return EngineState(self._model.max_context, None if level is None else level())
