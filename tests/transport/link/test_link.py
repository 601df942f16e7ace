from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.crypto.cipher import Cipher
from convoy.crypto.seal import SealLimits
from convoy.errors import ConvoyError, FrameError, FrameTooLong, LinkBroken, LinkClosed, PeerUnreachable
from convoy.testing.links import memory_link_pair
from convoy.testing.streams import Stall
from convoy.transport.link.link import Link, LinkOptions, Received, ReceivedMessage, ReceivedTensor
from convoy.transport.streams.stream import Stream
from convoy.wire.frame import RECORD_BYTES
from convoy.wire.messages.control import Activate, FrameType, Refuse, Row, Step
from convoy.wire.tensor import DESCRIPTOR_BYTES, WireTensor
from support.link_parts import (
    end_at_once,
    has_to_write,
    is_writing,
    num_waiting_pings,
    replace_sending_stream,
    sending_stream,
    threads_of,
)
from support.links import ALLOWED, WAIT_S, End, tls_link_pair
from support.members import make_local_members

ALPHA, BETA = make_local_members(["alpha", "beta"])
STEP = Step(7, [], [], [Row(1, 0, 2, 1)], b"\1\0\0\0\2\0\0\0")


def tensor(num_bytes: int, seed: int = 1) -> WireTensor:
    data = bytes((i * 31 + seed) % 251 for i in range(min(num_bytes, 4096)))
    data = (data * (num_bytes // max(1, len(data)) + 1))[:num_bytes]
    return WireTensor("bfloat16", (num_bytes // 2,), data)


@pytest.fixture(params=["memory", pytest.param("tls", marks=pytest.mark.outside)])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[End, End]]:
    if request.param == "tls":
        links = tls_link_pair(*make_local_members(["alpha", "beta"], tmp_path))
    else:
        links = memory_link_pair(ALPHA, BETA)
    yield End(links[0]).start(), End(links[1]).start()
    for link in links:
        link.close()


def test_each_end_knows_who_the_other_is(ends: tuple[End, End]) -> None:
    assert [end.link.peer for end in ends] == ["beta", "alpha"]
    assert ends[0].link.cipher == ends[1].link.cipher
    assert ends[0].link.cipher in {"AES-256-GCM", "ChaCha20-Poly1305"}


def test_messages_and_tensors_arrive_in_the_order_of_their_sending(ends: tuple[End, End]) -> None:
    here, there = ends
    for number in range(50):
        here.link.send(STEP, plan_id=3, step=number)
        here.link.send_tensor(tensor(64, number), plan_id=3, step=number, boundary=5)
    for number in range(50):
        assert there.next() == ReceivedMessage(3, number, STEP)
        item = there.next()
        assert isinstance(item, ReceivedTensor)
        assert (item.plan_id, item.step, item.boundary) == (3, number, 5)
        assert bytes(item.tensor.data) == tensor(64, number).data


FIRST = RECORD_BYTES - DESCRIPTOR_BYTES


@pytest.mark.parametrize(
    "size", [0, 2, FIRST - 2, FIRST, FIRST + 2, RECORD_BYTES, RECORD_BYTES + 2, 5 * RECORD_BYTES, 3_000_000]
)
def test_a_tensor_of_any_size_arrives_whole(ends: tuple[End, End], size: int) -> None:
    ends[0].link.send_tensor(tensor(size), plan_id=1, step=1, boundary=1)
    item = ends[1].next()
    assert isinstance(item, ReceivedTensor)
    assert item.tensor.shape == (size // 2,)
    assert bytes(item.tensor.data) == tensor(size).data


def test_received_memory_belongs_to_the_receiver(ends: tuple[End, End]) -> None:
    ends[0].link.send_tensor(tensor(512, 1), plan_id=1, step=1, boundary=1)
    first = ends[1].next()
    ends[0].link.send_tensor(tensor(512, 2), plan_id=1, step=2, boundary=1)
    ends[1].next()
    assert isinstance(first, ReceivedTensor)
    assert bytes(first.tensor.data) == tensor(512, 1).data


def test_both_directions_at_once(ends: tuple[End, End]) -> None:
    def send_all(link: Link) -> None:
        for number in range(20):
            link.send_tensor(tensor(400_000, number), plan_id=1, step=number, boundary=1)

    threads = [threading.Thread(target=send_all, args=(end.link,)) for end in ends]
    for thread in threads:
        thread.start()
    for end in ends:
        for number in range(20):
            item = end.next()
            assert isinstance(item, ReceivedTensor)
            assert item.step == number
            assert bytes(item.tensor.data) == tensor(400_000, number).data
    for thread in threads:
        thread.join()


def test_many_threads_may_send_and_each_keeps_its_order(ends: tuple[End, End]) -> None:
    def send_all(plan_id: int) -> None:
        for number in range(100):
            ends[0].link.send(STEP, plan_id=plan_id, step=number)

    threads = [threading.Thread(target=send_all, args=(g,)) for g in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {g: [] for g in range(4)}
    for _ in range(400):
        item = ends[1].next()
        seen[item.plan_id].append(item.step)
    assert all(steps == list(range(100)) for steps in seen.values())
    for thread in threads:
        thread.join()


def test_a_ping_measures_a_round_trip(ends: tuple[End, End]) -> None:
    assert 0 < ends[0].link.ping(WAIT_S) < WAIT_S
    assert 0 < ends[1].link.ping(WAIT_S) < WAIT_S
    assert ends[0].arrived.empty()
    assert ends[1].arrived.empty()


def test_counters_count_sealed_bytes_alike_at_both_ends(ends: tuple[End, End]) -> None:
    ends[0].link.send_tensor(tensor(1000), plan_id=1, step=1, boundary=1)
    ends[0].link.send(STEP)
    ends[1].next()
    ends[1].next()
    assert ends[0].link.sent_frames == ends[1].link.received_frames == 2
    assert ends[0].link.sent_sealed_bytes == ends[1].link.received_sealed_bytes > 1000


def test_a_goodbye_carries_its_reason(ends: tuple[End, End]) -> None:
    ends[0].link.send(STEP)
    ends[0].link.close("maintenance\nat noon")
    assert isinstance(ends[1].next(), ReceivedMessage)
    error = ends[1].error()
    assert isinstance(error, LinkBroken)
    assert error.message == "alpha closed the link: maintenance?at noon"
    assert isinstance(ends[0].error(), LinkClosed)


def test_the_end_is_told_exactly_once(ends: tuple[End, End]) -> None:
    ends[0].link.close()
    ends[0].link.close()
    ends[1].error()
    ends[1].link.close()
    ends[0].error()
    assert ends[0].ended.empty()
    assert ends[1].ended.empty()


def test_a_send_after_the_end_raises_at_once(ends: tuple[End, End]) -> None:
    ends[0].link.close()
    ends[1].error()
    with pytest.raises(LinkClosed):
        ends[0].link.send(STEP)
    with pytest.raises(LinkBroken, match="alpha closed the link"):
        ends[1].link.send(STEP)
    with pytest.raises(LinkBroken):
        ends[1].link.ping(WAIT_S)


def test_both_ends_closing_at_once_is_no_trouble(ends: tuple[End, End]) -> None:
    threads = [threading.Thread(target=end.link.close) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for end in ends:
        assert isinstance(end.error(), LinkClosed | LinkBroken)


def test_no_thread_is_left_when_a_link_is_closed(ends: tuple[End, End]) -> None:
    ends[0].link.close()
    ends[1].error()
    ends[1].link.close()
    mine = [thread for end in ends for thread in threads_of(end.link)]
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)


def test_a_frame_type_that_is_not_allowed_ends_the_link(ends: tuple[End, End]) -> None:
    ends[0].link.send(Activate(1, b"d" * 32, [4]))
    error = ends[1].error()
    assert isinstance(error, FrameError)
    assert "ACTIVATE, which it may not send here" in error.message
    assert ends[1].arrived.empty()
    assert isinstance(ends[0].error(), LinkBroken)


def test_a_message_over_its_limit_is_refused_at_the_sender(ends: tuple[End, End]) -> None:
    with pytest.raises(FrameTooLong, match="REFUSE"):
        ends[0].link.send(Refuse(1, "x" * 20_000, ""))
    ends[0].link.send(STEP)
    assert isinstance(ends[1].next(), ReceivedMessage)


def test_a_message_larger_than_the_pooled_buffer_arrives(ends: tuple[End, End]) -> None:
    long = Step(1, [], [], [], bytes(1_000_000))
    ends[0].link.send(long)
    ends[0].link.send(STEP)
    assert ends[1].next() == ReceivedMessage(0, 0, long)
    assert ends[1].next() == ReceivedMessage(0, 0, STEP)


def test_a_number_that_does_not_fit_the_header_is_the_callers_error(ends: tuple[End, End]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        ends[0].link.send_tensor(tensor(8), plan_id=1, step=1, boundary=1 << 16)
    with pytest.raises(ValueError, match="does not fit"):
        ends[0].link.send(STEP, step=-1)
    assert ends[0].link.ping(WAIT_S) > 0


def test_keys_may_turn_while_frames_flow() -> None:
    limits = LinkOptions(key_limits=SealLimits(max_records=3))
    links = memory_link_pair(ALPHA, BETA, options=limits)
    here, there = End(links[0]).start(), End(links[1]).start()
    for number in range(20):
        here.link.send_tensor(tensor(300_000, number), plan_id=1, step=number, boundary=1)
        item = there.next()
        assert isinstance(item, ReceivedTensor)
        assert bytes(item.tensor.data) == tensor(300_000, number).data
    here.link.close()


def test_chacha_is_used_where_one_end_has_no_aes() -> None:
    options = LinkOptions(ciphers=(Cipher.CHACHA20_POLY1305,))
    links = memory_link_pair(ALPHA, BETA, options=options)
    here, there = End(links[0]).start(), End(links[1]).start()
    assert here.link.cipher == there.link.cipher == "ChaCha20-Poly1305"
    here.link.send_tensor(tensor(300_000), plan_id=1, step=1, boundary=1)
    assert isinstance(there.next(), ReceivedTensor)
    here.link.close()


def test_a_receiver_that_blocks_holds_the_sender_back_and_loses_nothing() -> None:
    options = LinkOptions(max_queued_frames=4)
    links = memory_link_pair(ALPHA, BETA, options=options)
    inbox: queue.Queue[Received] = queue.Queue(2)
    links[1].start(lambda _, item: inbox.put(item), lambda *_: None, ALLOWED)
    here = End(links[0]).start()
    sent = []

    def send_all() -> None:
        for number in range(40):
            here.link.send_tensor(tensor(200_000), plan_id=1, step=number, boundary=1)
            sent.append(number)

    thread = threading.Thread(target=send_all)
    thread.start()
    assert inbox.get(timeout=WAIT_S).step == 0
    # 1 MiB of stream, two inbox places, one frame in hand, four queued: far fewer than forty may have left.
    thread.join(0.3)
    assert thread.is_alive()
    assert len(sent) < 20
    assert [inbox.get(timeout=WAIT_S).step for _ in range(39)] == list(range(1, 40))
    thread.join(10)
    here.link.close()


def test_a_peer_that_takes_nothing_for_too_long_breaks_the_link() -> None:
    stall = Stall(2)
    options = LinkOptions(max_queued_frames=2, stall_timeout_s=0.2, close_timeout_s=0.1)
    links = memory_link_pair(ALPHA, BETA, faults=[stall], options=options)
    here = End(links[0]).start()
    End(links[1]).start()

    def send_until(error: type[ConvoyError]) -> str:
        with pytest.raises(error) as caught:  # noqa: PT012 - one of them raises, which one is a matter of timing
            for _ in range(5):
                here.link.send(STEP)
        return caught.value.message

    blocked = threading.Thread(target=send_until, args=(LinkBroken,))
    blocked.start()
    while not is_writing(here.link):
        pass
    assert "took nothing for 0" in send_until(LinkBroken)
    blocked.join(10)
    assert not blocked.is_alive()
    # Not the one send alone: a frame that was dropped would be missing for good.
    assert "took nothing for 0" in here.error().message
    with pytest.raises(LinkBroken, match="took nothing"):
        here.link.send(STEP)


class Slow:
    """Delay every write of a stream for a while, and complete it."""

    def __init__(self, stream: Stream, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        time.sleep(self._seconds)
        self._stream.send_all(data)

    def recv_into(self, buffer: memoryview) -> int:
        return self._stream.recv_into(buffer)

    def set_deadline(self, at_s: float | None) -> None:
        self._stream.set_deadline(at_s)

    def close(self) -> None:
        self._stream.close()


def test_a_full_queue_that_moves_is_no_stall_and_loses_nothing() -> None:
    options = LinkOptions(max_queued_frames=1, stall_timeout_s=0.5)
    links = memory_link_pair(ALPHA, BETA, options=options)
    replace_sending_stream(links[0], Slow(sending_stream(links[0]), 0.03))
    here, there = End(links[0]).start(), End(links[1]).start()
    started_s = time.monotonic()

    def send_two(first: int) -> None:
        for number in (first, first + 1):  # twenty records each: one tensor takes longer than a stall may
            here.link.send_tensor(tensor(20 * RECORD_BYTES), plan_id=1, step=number, boundary=1)

    threads = [threading.Thread(target=send_two, args=(first,)) for first in (0, 2, 4)]
    for thread in threads:
        thread.start()
    assert sorted(there.next().step for _ in range(6)) == list(range(6))
    assert time.monotonic() - started_s > 2 * options.stall_timeout_s
    for thread in threads:
        thread.join()
    here.link.close()


def test_a_ping_gives_up_in_time_even_if_the_queue_is_full() -> None:
    stall = Stall(2)
    links = memory_link_pair(ALPHA, BETA, faults=[stall], options=LinkOptions(max_queued_frames=1))
    here = End(links[0]).start()

    def send_until_the_end() -> None:
        with pytest.raises(ConvoyError):  # noqa: PT012 - which one is a matter of timing
            for _ in range(5):
                here.link.send(STEP)

    blocked = threading.Thread(target=send_until_the_end)
    blocked.start()
    while not has_to_write(here.link):
        pass
    for _ in range(3):
        with pytest.raises(PeerUnreachable, match="did not answer a ping"):
            here.link.ping(0.05)
    end_at_once(here.link, LinkBroken("the test is over"))
    blocked.join(10)
    assert not blocked.is_alive()


def test_a_tensor_over_the_limit_is_refused_at_the_sender() -> None:
    links = memory_link_pair(ALPHA, BETA, options=LinkOptions(max_tensor_bytes=1000))
    here, there = End(links[0]).start(), End(links[1]).start()
    with pytest.raises(FrameTooLong, match="a tensor of 1002 bytes is over the limit of 1000"):
        here.link.send_tensor(tensor(1002), plan_id=1, step=1, boundary=1)
    here.link.send_tensor(tensor(1000), plan_id=1, step=2, boundary=1)
    assert there.next().step == 2
    here.link.close()


def test_a_ping_that_nobody_answers_gives_up_in_time() -> None:
    links = memory_link_pair(ALPHA, BETA)
    here = End(links[0]).start()
    with pytest.raises(PeerUnreachable, match=r"beta did not answer a ping within 0\.05 s"):
        here.link.ping(0.05)
    here.link.close()


def test_a_ping_wakes_when_the_link_ends() -> None:
    links = memory_link_pair(ALPHA, BETA)
    here = End(links[0]).start()
    outcome: list[ConvoyError] = []

    def ask() -> None:
        try:
            here.link.ping(60)
        except ConvoyError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not num_waiting_pings(here.link):
        pass
    links[1].start(lambda *_: None, lambda *_: None, ALLOWED)
    links[1].close("bye")
    thread.join(10)
    assert not thread.is_alive()


def test_a_bug_in_deliver_ends_the_link_instead_of_leaving_it_deaf(caplog: pytest.LogCaptureFixture) -> None:
    links = memory_link_pair(ALPHA, BETA)
    ended: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()

    def deliver(_link: Link, _item: Received) -> None:
        raise ZeroDivisionError

    links[1].start(deliver, lambda _, error: ended.put(error), ALLOWED)
    here = End(links[0]).start()
    here.link.send(STEP)
    assert "ZeroDivisionError" in ended.get(timeout=WAIT_S).message
    assert isinstance(here.error(), LinkBroken)


def test_closing_from_within_deliver_is_allowed() -> None:
    links = memory_link_pair(ALPHA, BETA)
    ended: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
    links[1].start(lambda link, _: link.close("enough"), lambda _, error: ended.put(error), ALLOWED)
    here = End(links[0]).start()
    here.link.send(STEP)
    assert isinstance(ended.get(timeout=WAIT_S), LinkClosed)
    assert here.error().message == "beta closed the link: enough"


def test_allowed_types_do_not_include_what_the_link_uses_itself() -> None:
    assert FrameType.PING not in ALLOWED
