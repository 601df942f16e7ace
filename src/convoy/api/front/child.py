"""The life of a front process: read the setup, load the tokenizer, serve HTTP, and end with the engine.

The engine's process decides when it drains, so this process ignores signals. If the channel ends, the other
process has gone, and this one ends at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from convoy.api.front.channel import FrontChannel
from convoy.api.front.convert import to_error
from convoy.api.front.remote import RemoteEngine, remote_service
from convoy.api.front.setup import FrontSetup, decode_setup, decode_tokenizer
from convoy.api.listen.options import ServeOptions
from convoy.api.problem import log_internal_error
from convoy.api.server import Stop, serve_on
from convoy.api.traces import Traces
from convoy.errors import ConvoyError, FrameError, Unavailable
from convoy.model.text.tokens import Tokenizer
from convoy.wire.front import (
    BeginServing,
    Drain,
    FromEngine,
    FrontDraining,
    FrontEnded,
    FrontFailed,
    FrontReady,
    OwnKey,
    Reload,
    Setup,
    decode_from_engine,
)

_log = logging.getLogger(__name__)

Tracing = Callable[[str | None], AbstractContextManager[Traces]]


def run_child(descriptor: int, tracing: Tracing, on_ready: Callable[[], None]) -> None:
    """Serve as the front process until the engine's process ends it.

    ``descriptor`` is that of the channel. ``tracing`` opens the traces to a URL, and ``on_ready`` is called
    once the server answers.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = FrontChannel(socket.socket(fileno=descriptor))
    try:
        _serve(channel, tracing, on_ready)
    except ConnectionError:
        # The engine's process has gone, so nothing is left to do.
        return
    except Exception as error:  # noqa: BLE001 - the engine's process tells the reason
        # The engine's process may go meanwhile.
        with suppress(OSError):
            channel.send(FrontFailed(to_error(_told(error))))


def _told(error: Exception) -> ConvoyError:
    if isinstance(error, ConvoyError):
        return error
    log_internal_error(_log, "-", error)
    return Unavailable(f"the front process met an internal error: {type(error).__name__}")


def _serve(channel: FrontChannel, tracing: Tracing, on_ready: Callable[[], None]) -> None:
    setup = _setup(_receive(channel))
    options = setup.options()
    # The files of the certificate may have changed since the first start.
    options.check()
    # The engine's process loads the model meanwhile.
    import convoy.api.app  # noqa: F401

    serve = _receive(channel)
    if not isinstance(serve, BeginServing):
        raise FrameError("the engine's process sent another message than that which begins to serve")
    listener = channel.receive_socket()
    tokenizer = Tokenizer(decode_tokenizer(serve.tokenizer))
    listener.setblocking(False)
    engine, stop = RemoteEngine(channel, tokenizer, serve), Stop()
    reader = threading.Thread(target=_read, args=(channel, engine, options, stop), name="engine", daemon=True)
    reader.start()

    def ready(_url: str) -> None:
        on_ready()
        channel.send(FrontReady())

    with tracing(setup.traces) as traces, listener:
        num_cut = serve_on(
            *(listener, remote_service(engine, tokenizer, serve), replace(options, traces=traces), stop),
            on_ready=ready,
            on_drain=lambda num_answers, _drain_s: channel.send(FrontDraining(num_answers)),
        )
    tokenizer.close()
    channel.send(FrontEnded(num_cut))


def _receive(channel: FrontChannel) -> FromEngine:
    payload = channel.receive()
    if payload is None:
        raise ConnectionResetError
    return decode_from_engine(payload)


def _setup(message: FromEngine) -> FrontSetup:
    if not isinstance(message, Setup):
        raise FrameError("the first message of the engine's process is no setup")
    return decode_setup(message.options)


def _read(channel: FrontChannel, engine: RemoteEngine, options: ServeOptions, stop: Stop) -> None:
    """Take messages until the engine's process has gone, and end this process then."""
    try:
        while True:
            message = _receive(channel)
            match message:
                case Drain():
                    stop.request()
                case Reload():
                    stop.request_reload()
                case OwnKey(name, text):
                    if options.keys is not None:
                        options.keys.add_own(name, text)
                case Setup() | BeginServing():
                    raise FrameError("the engine's process sent a message of the start again")
                case _:
                    engine.take(message)
    except FrameError as error:
        _log.error("the front process ends: %s", error.message)
    except ConnectionError:
        _log.debug("the engine's process has gone")
    except Exception as error:  # noqa: BLE001 - its text may hold an answer
        log_internal_error(_log, "-", error)
    finally:
        # No request can be answered any more, and an orderly end would wait for those that run.
        os._exit(1)
