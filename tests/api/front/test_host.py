"""The engine's end of the channel, before a front process that a test plays."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from convoy.api.front.channel import FrontChannel
from convoy.api.front.convert import RemoteGrammar, to_grammar, to_request
from convoy.api.front.host import EngineHost, FrontReport
from convoy.api.service import ServedModel, Service
from convoy.engine.requests.request import GenerationRequest
from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.constraints.matcher import CompiledGrammar
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.grammar import Grammar
from convoy.wire.front import (
    Ask,
    BeginServing,
    CallReply,
    Compile,
    FromEngine,
    OwnKey,
    Pull,
    Submit,
    decode_from_engine,
)
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
def played(model: ServedModel, puller: Any = None) -> Iterator[Played]:
    ours, theirs = socket.socketpair()
    reports: queue.SimpleQueue[FrontReport | None] = queue.SimpleQueue()
    service = Service((model,), lambda: (True, "it runs"), lambda: {"n": 1}, puller=puller)
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


class SlowGrammars(GrammarCompiler):
    """Compile nothing before a test lets go."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer())
        self.go = threading.Event()

    def compile(
        self, grammar: Grammar, param: str, *, caller: bytes = b"", owner: bytes = b""
    ) -> CompiledGrammar:
        self.go.wait(60)
        return super().compile(grammar, param, caller=caller, owner=owner)


def test_slow_grammars_delay_no_answer_about_the_clusters_health() -> None:
    grammars = SlowGrammars()
    grammar = to_grammar(RemoteGrammar(Grammar("regex", "a+"), "guided_regex", b"c", b"o"))
    with played(ServedModel("fake", FakeEngine(), ByteTokenizer(), 0, grammars)) as made:
        for number in range(40):
            made.front.send(Compile(number, grammar))
        made.front.send(Ask(99, "health"))
        assert made.next() == CallReply(99, b'[true,"it runs"]')
        grammars.go.set()


def test_a_front_process_that_does_not_read_holds_nothing_up_and_is_ended() -> None:
    ours, theirs = socket.socketpair()
    reports: queue.SimpleQueue[FrontReport | None] = queue.SimpleQueue()
    service = Service(
        (ServedModel("fake", FakeEngine(), ByteTokenizer()),), lambda: (True, ""), lambda: {"n": 1}
    )
    host = EngineHost(FrontChannel(ours), service, reports.put, max_pending=4)
    with theirs, socket.socket() as listener:
        host.start(b" " * (1 << 22), listener.fileno())
        for number in range(5):
            assert not host.is_stalled
            host.send(OwnKey("part", str(number)))
        assert host.is_stalled
        assert reports.get(timeout=60) is None
        host.close()


def test_a_front_process_that_reads_a_part_and_hangs_is_ended_in_time() -> None:
    ours, theirs = socket.socketpair()
    reports: queue.SimpleQueue[FrontReport | None] = queue.SimpleQueue()
    service = Service(
        (ServedModel("fake", FakeEngine(), ByteTokenizer()),), lambda: (True, ""), lambda: {"n": 1}
    )
    host = EngineHost(FrontChannel(ours, max_send_s=0.05), service, reports.put)
    with theirs, socket.socket() as listener:
        host.start(b" " * (1 << 22), listener.fileno())
        assert reports.get(timeout=60) is None
        assert host.is_stalled
        host.close()


def test_a_pull_and_its_refusal_cross_the_channel() -> None:
    pulled: list[str] = []

    class Puller:
        start, stop = pulled.append, lambda: pulled.append("stopped")

    with played(ServedModel("fake", FakeEngine(), ByteTokenizer()), Puller) as made:
        for name in ("org/name", ""):
            made.front.send(Pull(1, name))
            reply = made.next()
            assert isinstance(reply, CallReply)
            assert reply.error is None
    assert pulled == ["org/name", "stopped"]
    with played(ServedModel("fake", FakeEngine(), ByteTokenizer())) as made:
        made.front.send(Pull(1, "org/name"))
        reply = made.next()
        assert isinstance(reply, CallReply)
        assert reply.error is not None
        assert reply.error.message == "this head pulls no models"
