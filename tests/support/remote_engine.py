"""Both ends of the front process's channel in one process, around a service that a test controls."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from convoy.api.front.channel import FrontChannel
from convoy.api.front.host import EngineHost
from convoy.api.front.remote import RemoteEngine, remote_service
from convoy.api.service import Service
from convoy.wire.front import BeginServing, CallReply, EngineState, Outputs, decode_from_engine


@contextmanager
def over_a_channel(service: Service) -> Iterator[tuple[Service, EngineHost]]:
    """Yield a service that reaches ``service`` over a socket pair, and the host of its engine."""
    ours, theirs = socket.socketpair()
    (model,) = service.models
    near, far = FrontChannel(ours), FrontChannel(theirs)
    ended = threading.Event()
    host = EngineHost(near, service, lambda report: ended.set() if report is None else None)
    with socket.socket() as listener:
        host.start(b"", listener.fileno())
    payload = far.receive()
    assert payload is not None
    serve = decode_from_engine(payload)
    assert isinstance(serve, BeginServing)
    far.receive_socket().close()
    engine = RemoteEngine(far, model.tokenizer, serve)

    def read() -> None:
        while (payload := far.receive()) is not None:
            message = decode_from_engine(payload)
            assert isinstance(message, EngineState | CallReply | Outputs)
            engine.take(message)

    reader = threading.Thread(target=read, name="far-reader", daemon=True)
    reader.start()
    try:
        yield remote_service(engine, model.tokenizer, serve), host
    finally:
        far.close()
        assert ended.wait(10)
        host.close()
        reader.join(10)
