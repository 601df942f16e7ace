"""The engine's end of the channel, before a front process that a test plays."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from convoy.api.front.channel import FrontChannel
from convoy.api.front.convert import to_request
from convoy.api.front.host import EngineHost, FrontReport
from convoy.api.service import ServedModel, Service
from convoy.engine.requests.request import GenerationRequest
from convoy.model.sampling.params import SamplingParams
from convoy.wire.front import Ask, BeginServing, CallReply, FromEngine, Submit, decode_from_engine
from support.fake_service import ByteTokenizer, FakeEngine

REQUEST = GenerationRequest((1, 2), SamplingParams(temperature=0.0), max_tokens=100)


@dataclass
class Played:
    """Hold both ends of a channel. The front process is the test."""

    host: EngineHost
    front: FrontChannel
    reports: queue.SimpleQueue[FrontReport | None]

    def next(self) -> FromEngine:
        payload = self.front.receive()
        assert payload is not None
        return decode_from_engine(payload)


@contextmanager
def played(model: ServedModel) -> Iterator[Played]:
    ours, theirs = socket.socketpair()
    reports: queue.SimpleQueue[FrontReport | None] = queue.SimpleQueue()
    service = Service((model,), lambda: (True, "it runs"), lambda: {"n": 1})
    host, front = EngineHost(FrontChannel(ours), service, reports.put), FrontChannel(theirs)
    with socket.socket() as listener:
        host.start(b"{}", listener.fileno())
        made = Played(host, front, reports)
        assert isinstance(made.next(), BeginServing)
        front.receive_socket().close()
    try:
        yield made
    finally:
        host.close()
        front.close()


def test_a_request_beyond_the_bounds_of_a_message_ends_alone() -> None:
    fields = to_request(REQUEST, tells_text=False)
    with played(ServedModel("fake", FakeEngine(), ByteTokenizer())) as made:
        for wrong in (
            msgspec.structs.replace(fields, prompt_ids=(-1,)),
            msgspec.structs.replace(fields, prompt_ids=(1 << 40,)),
            msgspec.structs.replace(fields, num_choices=0),
        ):
            made.front.send(Submit(7, wrong))
            reply = made.next()
            assert isinstance(reply, CallReply)
            assert reply.error is not None
            assert (reply.number, reply.error.kind) == (7, "RequestError")
        made.front.send(Ask(8, "health"))
        assert made.next() == CallReply(8, b'[true,"it runs"]')
        assert made.reports.empty()
