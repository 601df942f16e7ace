"""Half-open links, half-sent tensors and links too many: noticed, named, and ended within their time."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.errors import ConvoyError, HandshakeError, LinkBroken, PeerUnreachable
from convoy.testing.links import memory_link_pair
from convoy.transport.byte_budget import ByteBudget
from convoy.transport.dial import dial
from convoy.transport.link.establish import send_opening
from convoy.transport.link.incoming import Received, ReceivedTensor
from convoy.transport.link.link import Link
from convoy.transport.listen.listener import Listener
from convoy.transport.member import LocalMember
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.transport.streams.tcp import TlsStream, client_context, start_tls_client
from convoy.wire.codec import encode_message
from convoy.wire.frame import encode_handshake
from convoy.wire.messages.control import FrameType, Row, Step
from convoy.wire.tensor import WireTensor
from support.link_parts import go_on_writing, replace_sending_stream, sending_stream, stop_writing
from support.links import ALLOWED, WAIT_S, End, tls_link_pair
from support.listener_process import client_hello
from support.members import make_local_members, membership_of
from support.relay import Relay
from support.waiting import wait_until

QUICK = LinkOptions(ping_after_s=0.1, gone_after_s=0.6, stall_timeout_s=1.0)
STEP = Step(7, [], [], [Row(1, 0, 2, 1)], b"")
LARGE_BYTES = 4 * 1000 * 256


@pytest.fixture
def members(tmp_path: Path) -> tuple[LocalMember, ...]:
    return make_local_members(["alpha", "beta", "gamma"], tmp_path)


def large_tensor() -> WireTensor:
    return WireTensor("float32", (1000, 256), bytes(LARGE_BYTES))


class Valve:
    """Pass so many more bytes once it is turned down, and take the rest as if they left."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.left_bytes: int | None = None

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        if self.left_bytes is not None:
            view = view[: self.left_bytes]
            self.left_bytes -= len(view)
        if view:
            self._stream.send_all(view)

    def recv_into(self, buffer: memoryview) -> int:
        return self._stream.recv_into(buffer)

    def set_deadline(self, at_s: float | None) -> None:
        self._stream.set_deadline(at_s)

    def close(self) -> None:
        self._stream.close()


def valve_on(link: Link) -> Valve:
    """Put a valve on the sending connection of ``link``."""
    valve = Valve(sending_stream(link))
    replace_sending_stream(link, valve)
    return valve


def test_the_standing_times_are_those_of_the_page() -> None:
    options = LinkOptions()
    assert (options.ping_after_s, options.gone_after_s, options.max_links_per_member) == (10.0, 30.0, 4)


@pytest.mark.outside
def test_an_idle_link_is_pinged_from_both_ends_and_lives(members: tuple[LocalMember, ...]) -> None:
    ends = [End(link).start() for link in tls_link_pair(*members[:2], options=QUICK)]
    time.sleep(3 * QUICK.gone_after_s)  # the point is that time passes and nothing happens
    assert all(end.ended.empty() for end in ends)
    assert all(end.link.received_frames >= 4 for end in ends)
    ends[0].link.send(STEP)
    ends[1].next()
    ends[0].link.close()
    ends[1].error()


@pytest.mark.parametrize("way", [0, 3])  # those that carry frames, one of each connection
@pytest.mark.outside
def test_a_loss_one_way_on_one_connection_is_noticed_at_both_ends(
    members: tuple[LocalMember, ...], way: int
) -> None:
    relays: list[Relay] = []

    def through(address: tuple[str, int]) -> tuple[str, int]:
        relays.append(Relay(address))
        return relays[0].address

    here, there = (End(e).start() for e in tls_link_pair(*members[:2], through=through, options=QUICK))
    relays[0].lose(way)
    errors = [here.error(), there.error()]
    assert all(isinstance(error, LinkBroken) for error in errors)
    assert any("nothing came for 0.6 s" in error.message for error in errors)
    relays[0].close()


def test_a_receiver_that_is_busy_does_not_call_its_peer_gone(members: tuple[LocalMember, ...]) -> None:
    mine, theirs = memory_link_pair(*members[:2], options=QUICK)
    go_on = threading.Event()
    ended: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
    arrived: queue.SimpleQueue[Received] = queue.SimpleQueue()

    def deliver(_link: Link, received: Received) -> None:
        go_on.wait(WAIT_S)
        arrived.put(received)

    theirs.start(deliver, lambda _link, error: ended.put(error), ALLOWED)
    here = End(mine).start()
    here.link.send(STEP)
    time.sleep(3 * QUICK.gone_after_s)
    here.link.send(STEP)
    go_on.set()
    for _ in range(2):
        arrived.get(timeout=WAIT_S)
    assert ended.empty()
    here.link.close()
    ended.get(timeout=WAIT_S)


@pytest.mark.parametrize("kind", ["memory", "tls"])
@pytest.mark.long
def test_a_member_that_is_held_back_is_there_and_one_that_hangs_is_not(
    members: tuple[LocalMember, ...], kind: str
) -> None:
    """A PING behind what its owner has not looked at yet is not read; so it says unasked that it is there."""
    pair = memory_link_pair if kind == "memory" else tls_link_pair
    mine, theirs = pair(*members[:2])
    go_on = threading.Event()

    def deliver(_link: Link, _received: Received) -> None:
        go_on.wait(WAIT_S)

    theirs.start(deliver, lambda *_: None, ALLOWED)
    here = End(mine).start()
    here.link.send(STEP)
    with pytest.raises(PeerUnreachable):
        here.link.ping(1.0)
    assert here.link.is_there(1.0)
    stop_writing(theirs)
    wait_until(lambda: not here.link.is_there(0.6))  # what left it before may come still
    go_on_writing(theirs)
    go_on.set()
    assert here.link.is_there(WAIT_S)
    here.link.close()


def test_a_busy_member_suspects_no_peer_of_silence(members: tuple[LocalMember, ...]) -> None:
    mine, theirs = memory_link_pair(*members[:2])
    inside, go_on = threading.Event(), threading.Event()

    def deliver(_link: Link, _received: Received) -> None:
        inside.set()
        go_on.wait(WAIT_S)

    mine.start(deliver, lambda *_: None, ALLOWED)
    there = End(theirs).start()
    there.link.send(STEP)
    assert inside.wait(WAIT_S)
    assert mine.is_there(0.05)
    go_on.set()
    mine.close()


@pytest.mark.parametrize("dribbles", [False, True])
def test_half_a_tensor_is_not_held_for_ever(members: tuple[LocalMember, ...], dribbles: bool) -> None:
    """A tensor has one time for all of it, so that a few bytes now and then do not help."""
    budget = ByteBudget()
    options = LinkOptions(
        ping_after_s=0.1, gone_after_s=30, stall_timeout_s=0.5, floor_bytes_per_s=1e9, memory_budget=budget
    )
    mine, theirs = memory_link_pair(*members[:2], options=options)
    here, there = End(mine).start(), End(theirs).start()
    valve = valve_on(mine)
    valve.left_bytes = 200_000
    here.link.send_tensor(large_tensor(), plan_id=1, step=1, boundary=3)
    while budget.taken_bytes == 0 and there.ended.empty():
        time.sleep(0.001)
    with contextlib.suppress(LinkBroken):
        while dribbles and there.ended.empty():
            valve._stream.send_all(b"x")
            time.sleep(0.02)
    error = there.error()
    assert isinstance(error, LinkBroken)
    assert f"a tensor of {LARGE_BYTES} bytes did not come whole within 0.501 s" in error.message
    assert budget.taken_bytes == 0


def test_half_tensors_of_all_links_share_one_budget_and_who_finds_none_is_named(
    members: tuple[LocalMember, ...],
) -> None:
    budget = ByteBudget(int(1.5 * LARGE_BYTES))
    options = LinkOptions(stall_timeout_s=2.0, memory_budget=budget, floor_bytes_per_s=1e4)
    pairs = [memory_link_pair(members[i], members[2], options=options) for i in (0, 1)]
    ends = [(End(mine).start(), End(theirs).start()) for mine, theirs in pairs]
    valve = valve_on(pairs[0][0])
    valve.left_bytes = 200_000
    ends[0][0].link.send_tensor(large_tensor(), plan_id=1, step=1, boundary=3)
    while budget.taken_bytes == 0:
        time.sleep(0.001)
    ends[1][0].link.send_tensor(large_tensor(), plan_id=1, step=1, boundary=3)
    error = ends[1][1].error()
    assert f"no memory for a tensor of {LARGE_BYTES} bytes" in error.message
    assert budget.taken_bytes == LARGE_BYTES
    for end in (*ends[0], *ends[1]):
        end.link.close()
    assert budget.taken_bytes == 0


def test_a_long_message_counts_in_the_budget_until_it_is_whole(members: tuple[LocalMember, ...]) -> None:
    """Twice: as it comes, and as what it says. What its header claims counts for nothing."""
    long = Step(7, [], [], [], bytes(LARGE_BYTES))
    size = len(encode_message(long))
    budget = ByteBudget(3 * size)
    options = LinkOptions(stall_timeout_s=2.0, memory_budget=budget, floor_bytes_per_s=1e4)
    pairs = [memory_link_pair(members[i], members[2], options=options) for i in (0, 1)]
    ends = [(End(mine).start(), End(theirs).start()) for mine, theirs in pairs]
    valve = valve_on(pairs[0][0])
    valve.left_bytes = 200_000
    ends[0][0].link.send(long)
    while budget.taken_bytes == 0:
        time.sleep(0.001)
    assert budget.taken_bytes == 2 * size
    ends[1][0].link.send(long)
    # A receiver that waits for room reads no ping, and sends a sign of life unasked.
    assert ends[1][0].link.is_there(0.8)
    assert f"no memory for a STEP of {size} bytes" in ends[1][1].error().message
    for end in (*ends[0], *ends[1]):
        end.link.close()
    assert budget.taken_bytes == 0


def test_a_tensor_that_waits_for_the_budget_comes_once_there_is_room(
    members: tuple[LocalMember, ...],
) -> None:
    budget = ByteBudget(LARGE_BYTES)
    assert budget.take(LARGE_BYTES, 0)
    options = LinkOptions(memory_budget=budget)
    here, there = (End(link).start() for link in memory_link_pair(*members[:2], options=options))
    here.link.send_tensor(large_tensor(), plan_id=1, step=1, boundary=3)
    assert there.arrived.empty()
    budget.give(LARGE_BYTES)
    assert isinstance(there.next(), ReceivedTensor)
    assert budget.taken_bytes == 0
    here.link.close()


@pytest.mark.outside
def test_a_member_has_only_so_many_links_and_the_most_silent_gives_way(
    members: tuple[LocalMember, ...],
) -> None:
    links: queue.SimpleQueue[End] = queue.SimpleQueue()
    # No ping during the test: on a busy machine one would make the silent link the less silent one.
    options = LinkOptions(max_links_per_member=2, ping_after_s=100 * WAIT_S, gone_after_s=200 * WAIT_S)
    listener = Listener(
        ("127.0.0.1", 0),
        membership_of(members[1]),
        lambda link: links.put(End(link).start()),
        options=options,
    )

    def call(me: LocalMember) -> tuple[End, End]:
        mine = dial(
            listener.address, me=membership_of(me), peer_name="beta", timeout_s=WAIT_S, options=options
        )
        return End(mine).start(), links.get(timeout=WAIT_S)

    other = call(members[2])
    first, second = call(members[0]), call(members[0])
    # A link whose receiver does not wait yet counts as heard now.
    wait_until(lambda: second[1].link.heard_s == second[1].link.heard_s)
    first[0].link.send(STEP)
    first[1].next()
    third = call(members[0])
    assert "too many links of one member" in second[0].error().message
    for mine, theirs in (first, third, other):
        mine.link.send(STEP)
        theirs.next()
        mine.link.close()
    listener.close()


@pytest.mark.outside
def test_after_close_returned_no_link_is_handed_over(members: tuple[LocalMember, ...]) -> None:
    """`on_link` that passed the check just before is waited for, so that its link can be closed too."""
    inside, go_on = threading.Event(), threading.Event()
    taken: list[Link] = []

    def on_link(link: Link) -> None:
        inside.set()
        go_on.wait(WAIT_S)
        taken.append(link)

    listener = Listener(
        ("127.0.0.1", 0), membership_of(members[1]), on_link, options=LinkOptions(close_timeout_s=WAIT_S)
    )
    mine = dial(listener.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
    assert inside.wait(WAIT_S)
    threading.Timer(0.2, go_on.set).start()
    listener.close()
    assert len(taken) == 1
    for link in (mine, *taken):
        link.close()


def test_looking_a_name_up_is_within_the_time_of_a_dial(
    members: tuple[LocalMember, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def never(*_args: object, **_more: object) -> object:
        answer.wait(WAIT_S)
        raise OSError("no answer")

    monkeypatch.setattr("socket.getaddrinfo", never)
    with pytest.raises(PeerUnreachable, match=r"beta at beta\.example:7000 .* did not answer in time"):
        dial(("beta.example", 7000), me=membership_of(members[0]), peer_name="beta", timeout_s=0.3)
    answer.set()


def dribble(send: Callable[[bytes], None], data: bytes) -> None:
    """Send byte by byte, so slowly that each one is in time and all together are not."""
    for byte in data:
        send(bytes([byte]))
        time.sleep(0.06)
    pytest.fail("the listener read every byte")


@pytest.mark.parametrize("stage", ["tls", "opening", "message 1"])
@pytest.mark.outside
def test_a_deadline_is_a_total_and_no_byte_moves_it(members: tuple[LocalMember, ...], stage: str) -> None:
    refused: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
    options = LinkOptions(handshake_timeout_s=1.0)
    listener = Listener(
        ("127.0.0.1", 0),
        membership_of(members[1]),
        lambda _link: None,
        options=options,
        on_refused=refused.put,
    )
    with contextlib.suppress(ConvoyError, OSError):
        if stage == "tls":
            with socket.create_connection(listener.address) as sock:
                dribble(sock.sendall, client_hello(members[0]))
        elif stage == "opening":
            stream = tls_stream(members[0], listener.address)
            dribble(stream.send_all, encode_handshake(FrameType.OPENING, bytes(60)))
        else:
            streams = [tls_stream(members[0], listener.address) for _ in range(2)]
            for direction, stream in enumerate(streams):
                send_opening(stream, direction, b"l" * 16)
            dribble(streams[0].send_all, encode_handshake(FrameType.HANDSHAKE_1, bytes(2000)))
    error = refused.get(timeout=WAIT_S)
    listener.close()
    assert isinstance(error, HandshakeError | PeerUnreachable), error.message


def tls_stream(me: LocalMember, address: tuple[str, int]) -> TlsStream:
    sock = socket.create_connection(address)
    stream = TlsStream(start_tls_client(sock, client_context(me), time.monotonic() + WAIT_S), 60)
    stream.set_deadline(time.monotonic() + WAIT_S)
    return stream
