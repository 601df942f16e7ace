"""A link outlives its connections: they are replaced under traffic, and their users do not notice."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from convoy.crypto.seal import MAX_SEQUENCE
from convoy.errors import ConvoyError, FrameError, HandshakeError, LinkBroken, LinkClosed, PeerUnreachable
from convoy.testing.links import memory_link_pair
from convoy.transport.dial import dial
from convoy.transport.link.key_usage import KeyUsage
from convoy.transport.link.link import Link, LinkOptions, ReceivedMessage, ReceivedTensor
from convoy.transport.link.outgoing import OutgoingFrame, message_frame
from convoy.transport.link.replacement import Connections, Replacement
from convoy.transport.listen.listener import Listener
from convoy.wire.messages.control import FrameType, Row, Step
from convoy.wire.messages.link import Switch
from convoy.wire.tensor import WireTensor
from support.links import WAIT_S, End
from support.members import make_local_members, membership_of
from support.waiting import wait_until

ALPHA, BETA = make_local_members(["alpha", "beta"])
STEP = Step(7, [], [], [Row(1, 0, 2, 1)], b"\1\0\0\0\2\0\0\0")
OPTIONS = LinkOptions(
    replace_after_records=300, replace_retry_s=0.01, close_timeout_s=5.0, max_queued_frames=4
)
LARGE = 1_000_000


def tensor(num_bytes: int, seed: int) -> WireTensor:
    block = bytes((i * 31 + seed) % 251 for i in range(4096))
    return WireTensor("bfloat16", (num_bytes // 2,), (block * (num_bytes // 4096 + 1))[:num_bytes])


@dataclass(slots=True)
class Pair:
    """Hold two started ends, and the replacements that the dialler tried."""

    here: End
    there: End
    tried: list[Link | ConvoyError] = field(default_factory=list)

    def close(self) -> None:
        self.here.link.close()
        self.there.link.close()

    @property
    def num_replaced(self) -> int:
        return sum(isinstance(result, Link) for result in self.tried)


def count(pair: Pair, fail_first: int = 0) -> Pair:
    """Note each redial; the first so many fail before they reach the other end."""
    replacement = pair.here.link._replacement
    redial = replacement.redial
    assert redial is not None

    def redial_and_note() -> Connections:
        if len(pair.tried) < fail_first:
            pair.tried.append(PeerUnreachable("the test lets nobody through"))
            raise PeerUnreachable("the test lets nobody through")
        fresh = redial()
        pair.tried.append(pair.here.link)
        return fresh

    replacement.redial = redial_and_note
    return pair


Make = Callable[[LinkOptions], Pair]


@pytest.fixture(params=["memory", pytest.param("tls", marks=pytest.mark.outside)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[Pair] = []
    listeners: list[Listener] = []

    def over_tls(options: LinkOptions) -> tuple[Link, Link]:
        me, other = make_local_members(["alpha", "beta"], tmp_path / str(len(made)))
        arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()
        listener = Listener(("127.0.0.1", 0), membership_of(other), arrived.put, options=options)
        listeners.append(listener)
        link = dial(
            listener.address, me=membership_of(me), peer_name="beta", timeout_s=WAIT_S, options=options
        )
        return link, arrived.get(timeout=WAIT_S)

    def make_pair(options: LinkOptions) -> Pair:
        links = (
            over_tls(options) if request.param == "tls" else memory_link_pair(ALPHA, BETA, options=options)
        )
        made.append(Pair(End(links[0]).start(), End(links[1]).start()))
        return made[-1]

    yield make_pair
    for pair in made:
        pair.close()
    for listener in listeners:
        listener.close()


def exchange(pair: Pair, num_rounds: int) -> None:
    """Send both ways at once: messages, small and large tensors; all of it arrives whole and in order."""

    def send_all(link: Link) -> None:
        for number in range(num_rounds):
            link.send(STEP, plan_id=3, step=number)
            link.send_tensor(tensor(LARGE, number), plan_id=3, step=number, boundary=5)
            link.send_tensor(tensor(64, number), plan_id=3, step=number, boundary=6)

    threads = [threading.Thread(target=send_all, args=(end.link,)) for end in (pair.here, pair.there)]
    for thread in threads:
        thread.start()
    for end in (pair.here, pair.there):
        for number in range(num_rounds):
            assert end.next() == ReceivedMessage(3, number, STEP)
            for size, boundary in ((LARGE, 5), (64, 6)):
                item = end.next()
                assert isinstance(item, ReceivedTensor)
                assert (item.step, item.boundary) == (number, boundary)
                assert bytes(item.tensor.data) == tensor(size, number).data
    for thread in threads:
        thread.join()


def use_up(pair: Pair) -> None:
    """Send small messages until a replacement was tried."""
    tried = len(pair.tried)
    while len(pair.tried) == tried:
        pair.here.link.send(STEP)
        pair.there.next()


def test_connections_are_replaced_under_full_two_way_traffic_and_nothing_is_lost(make: Make) -> None:
    pair = count(make(OPTIONS))
    for _ in range(5):  # on a busy machine the traffic may be over first
        exchange(pair, 40)
        if pair.num_replaced >= 3:
            break
    assert pair.num_replaced >= 3
    for one, other in ((pair.here, pair.there), (pair.there, pair.here)):
        wait_until(lambda one=one, other=other: one.link.sent_frames == other.link.received_frames)  # type: ignore[misc]
        assert one.link.sent_sealed_bytes == other.link.received_sealed_bytes
        assert one.ended.empty()


def test_a_link_keeps_its_id_and_binding_when_its_connections_change(make: Make) -> None:
    pair = count(make(OPTIONS))
    before = [(end.link.link_id, end.link.binding) for end in (pair.here, pair.there)]
    exchange(pair, 10)
    wait_until(lambda: pair.num_replaced >= 1)  # on a busy machine the traffic may be over first
    assert [(end.link.link_id, end.link.binding) for end in (pair.here, pair.there)] == before
    assert before[0] == before[1]


def test_an_idle_direction_is_switched_too(make: Make) -> None:
    pair = count(make(OPTIONS))
    old = [*pair.here.link._streams, *pair.there.link._streams]
    use_up(pair)
    for end in (pair.here, pair.there):
        wait_until(lambda end=end: end.link._outgoing._stream not in old)  # type: ignore[misc]
        wait_until(lambda end=end: end.link._incoming._stream not in old)  # type: ignore[misc]
    for stream in old:
        with pytest.raises(LinkBroken):
            stream.send_all(b"x")
    assert pair.here.link.ping(WAIT_S) > 0
    assert pair.there.link.ping(WAIT_S) > 0


def test_the_keys_of_replaced_connections_are_wiped(make: Make) -> None:
    pair = count(make(OPTIONS))
    links = [pair.here.link, pair.there.link]
    sealers = [link._outgoing._sealer for link in links]
    openers = [link._incoming._opener for link in links]
    held = [each._key._secret for each in (*sealers, *openers)]  # type: ignore[attr-defined]
    assert all(any(secret) for secret in held)
    use_up(pair)
    wait_until(lambda: not any(any(secret) for secret in held))
    assert pair.here.link.ping(WAIT_S) > 0


def test_a_replacement_that_fails_is_tried_again_while_there_is_room(make: Make) -> None:
    pair = count(make(OPTIONS), fail_first=3)
    while pair.num_replaced == 0:  # the log lines of the failures are the operator's
        pair.here.link.send(STEP)
        pair.there.next()
    assert [type(result) for result in pair.tried[:4]] == [*[PeerUnreachable] * 3, Link]
    exchange(pair, 5)


def test_a_link_whose_connections_cannot_be_replaced_ends_at_the_limit_by_name(make: Make) -> None:
    pair = count(make(replace(OPTIONS, max_tls_records=600)), fail_first=10**9)
    sent = 0
    named = "has carried 600 TLS records, the most for one key is 600"
    with pytest.raises(LinkBroken, match=named):  # noqa: PT012 - one of them raises
        for _ in range(1000):
            pair.here.link.send(STEP)
            sent += 1
    assert sent in {599, 600}
    assert "TLS records" in pair.here.error().message
    assert isinstance(pair.there.error(), LinkBroken)


def test_the_listener_ends_a_link_that_its_dialler_never_replaces(make: Make) -> None:
    pair = make(replace(OPTIONS, max_tls_records=600))
    pair.here.link._replacement.redial = None
    pair.here.link._outgoing._key_usage._max_records = 10**9
    pair.here.link._incoming._key_usage._max_records = 10**9
    with pytest.raises(LinkBroken, match="TLS records"):  # noqa: PT012 - one of them raises
        for _ in range(1000):
            pair.there.link.send(STEP)
    assert "TLS records" in pair.there.error().message


def test_closing_while_connections_are_replaced_ends_both_ends(make: Make) -> None:
    for _ in range(3):
        pair = count(make(OPTIONS))
        use_up(pair)
        pair.there.link.close("enough")
        assert isinstance(pair.here.error(), LinkBroken | LinkClosed)
        assert isinstance(pair.there.error(), LinkBroken | LinkClosed)


def switch_to(link_id: bytes) -> OutgoingFrame:
    return message_frame(Switch(link_id))


def test_a_switch_to_connections_that_nobody_made_ends_the_link(make: Make) -> None:
    pair = make(OPTIONS)
    pair.here.link._outgoing.send(switch_to(os.urandom(16)))
    error = pair.there.error()
    assert isinstance(error, FrameError)
    assert error.message == "alpha switched to connections that this end does not have"


def test_a_switch_to_other_connections_than_those_kept_ends_the_link() -> None:
    links = memory_link_pair(ALPHA, BETA, options=OPTIONS)
    fresh = memory_link_pair(ALPHA, BETA, options=OPTIONS, replaces=links[0].link_id)
    links[1].keep(fresh[1])
    here, there = End(links[0]).start(), End(links[1]).start()
    here.link._outgoing.send(switch_to(os.urandom(16)))
    error = there.error()
    assert isinstance(error, FrameError)
    assert error.message == "alpha switched to connections that this end does not have"
    with pytest.raises(LinkBroken):
        fresh[1]._streams[0].send_all(b"x")


def test_a_dialler_that_switches_again_and_takes_nothing_piles_up_no_connections() -> None:
    links = memory_link_pair(ALPHA, BETA, options=replace(OPTIONS, stall_timeout_s=0.2))
    links[1]._outgoing._busy = True  # a write under way that the dialler does not take
    first, second = (
        memory_link_pair(ALPHA, BETA, options=OPTIONS, replaces=links[0].link_id) for _ in range(2)
    )
    End(links[0]).start()
    there = End(links[1]).start()
    for fresh in (first, second):
        links[1].keep(fresh[1])
        links[0]._commit(fresh[0].release())
        while links[1]._replacement._kept is not None:
            time.sleep(0.001)
    assert "did not take a SWITCH for 0.2 s, and sent another" in there.error().message
    for fresh in (first, second):
        with pytest.raises(LinkBroken):
            fresh[1]._streams[0].send_all(b"x")
        assert fresh[1]._outgoing._sealer.sequence == MAX_SEQUENCE
    links[0].close()


def test_a_listener_that_confirms_other_connections_is_not_switched_to() -> None:
    links = memory_link_pair(ALPHA, BETA, options=OPTIONS)
    pair = Pair(End(links[0]).start(), End(links[1]).start())
    tried: list[Link] = []

    def redial() -> Link:
        fresh = memory_link_pair(ALPHA, BETA, options=OPTIONS, replaces=links[0].link_id)
        fresh[1]._outgoing.send(switch_to(os.urandom(16)))
        tried.append(fresh[0])
        return fresh[0]

    links[0].replace_with(redial)
    while len(tried) < 2:
        pair.here.link.send(STEP)
        pair.there.next()
    assert pair.there.link.ping(WAIT_S) > 0
    pair.close()


def test_a_frame_behind_switch_on_the_old_connection_ends_the_link() -> None:
    links = memory_link_pair(ALPHA, BETA, options=OPTIONS)
    fresh = memory_link_pair(ALPHA, BETA, options=OPTIONS, replaces=links[0].link_id)
    links[1].keep(fresh[1])
    outgoing = links[0]._outgoing
    outgoing._pack(switch_to(fresh[1].link_id))
    outgoing._pack(switch_to(fresh[1].link_id))
    outgoing._flush()
    there = End(links[1]).start()
    error = there.error()
    assert isinstance(error, FrameError)
    assert "bytes follow SWITCH" in error.message


def test_connections_that_the_dialler_gave_up_are_closed_by_the_next_ones_and_by_the_end() -> None:
    links = memory_link_pair(ALPHA, BETA, options=OPTIONS)
    first, second = (
        memory_link_pair(ALPHA, BETA, options=OPTIONS, replaces=links[0].link_id) for _ in range(2)
    )
    links[1].keep(first[1])
    links[1].keep(second[1])
    with pytest.raises(LinkBroken):
        first[1]._streams[0].send_all(b"x")
    second[1]._streams[0].send_all(b"x")
    links[1].close()
    with pytest.raises(LinkBroken):
        second[1]._streams[0].send_all(b"x")
    third = memory_link_pair(ALPHA, BETA, options=OPTIONS, replaces=links[0].link_id)
    with pytest.raises(LinkBroken, match="ended before its connections were replaced"):
        links[1].keep(third[1])


def test_new_connections_that_the_listener_does_not_confirm_are_given_up_and_the_old_ones_live_on() -> None:
    options = replace(OPTIONS, handshake_timeout_s=1.0)
    links = memory_link_pair(ALPHA, BETA, options=options)
    pair = Pair(End(links[0]).start(), End(links[1]).start())
    unconfirmed: list[Link] = []

    def redial() -> Link:
        fresh = memory_link_pair(ALPHA, BETA, options=options, replaces=links[0].link_id)
        fresh[1]._streams[0].set_deadline(None)
        fresh[1].release().close()  # as a listener that has no such link
        unconfirmed.append(fresh[0])
        return fresh[0]

    links[0].replace_with(redial)
    while len(unconfirmed) < 3:
        pair.here.link.send(STEP)
        pair.there.next()
    assert pair.there.link.ping(WAIT_S) > 0
    with pytest.raises(LinkBroken):
        unconfirmed[0]._streams[0].send_all(b"x")
    pair.close()


@pytest.mark.parametrize("case", ["unknown", "of another member", "over"])
@pytest.mark.outside
def test_a_listener_replaces_only_a_link_that_stands_with_the_same_member(case: str, tmp_path: Path) -> None:
    alpha, beta, gamma = make_local_members(["alpha", "beta", "gamma"], tmp_path)
    arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()
    refused: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
    listener = Listener(("127.0.0.1", 0), membership_of(beta), arrived.put, on_refused=refused.put)
    call = partial(dial, listener.address, peer_name="beta", timeout_s=WAIT_S)
    standing = End(call(me=membership_of(alpha))).start()
    others = End(arrived.get(timeout=WAIT_S)).start()
    if case == "over":
        standing.link.close()
        others.error()
    who = gamma if case == "of another member" else alpha
    fresh = call(
        me=membership_of(who), replaces=os.urandom(16) if case == "unknown" else standing.link.link_id
    )
    error = refused.get(timeout=WAIT_S)
    assert isinstance(error, HandshakeError)
    assert error.message == f"{who.name} wants to replace a link that does not stand between us"
    with pytest.raises(LinkBroken):
        fresh._incoming.receive(frozenset({FrameType.SWITCH}))
    assert arrived.empty()
    assert (case == "over") or standing.link.ping(WAIT_S) > 0
    standing.link.close()
    listener.close()


def test_connections_that_could_not_be_switched_to_do_not_push_out_those_in_use() -> None:
    """The end of a link closes what carries it, however often a replacement failed before."""
    links = memory_link_pair(ALPHA, BETA, options=OPTIONS)
    in_use = links[0]._streams
    links[0]._outgoing._closing = True
    for _ in range(4):
        fresh = memory_link_pair(ALPHA, BETA, options=OPTIONS, replaces=links[0].link_id)
        with pytest.raises(LinkClosed):
            links[0]._commit(fresh[0].release())
    links[0]._end(LinkBroken("the test is over"))
    for stream in in_use:
        with pytest.raises(LinkBroken):
            stream.send_all(b"x")


def test_a_replacement_stops_once_its_link_is_being_closed(caplog: pytest.LogCaptureFixture) -> None:
    tried = 0

    def redial() -> Connections:
        nonlocal tried
        tried += 1
        raise LinkClosed("the link is being closed")

    replacement = Replacement("beta", replace(OPTIONS, close_timeout_s=0.0), lambda _: None)
    replacement.redial = redial
    replacement._run()
    assert tried == 1
    assert not caplog.records


def test_a_replacement_that_fails_is_told_once_the_link_stands_long_enough_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where its peer is leaving, a replacement fails too, and there is nothing for an operator to see to."""
    for close_timeout_s, num_told in ((60.0, 0), (0.0, 2)):
        caplog.clear()
        replacement = Replacement("beta", replace(OPTIONS, close_timeout_s=close_timeout_s), lambda _: None)
        causes = [PeerUnreachable("nobody is there")] * 3

        def redial(causes: list[PeerUnreachable] = causes, over: Replacement = replacement) -> Connections:
            error = causes.pop()
            if not causes:
                over.end()  # the peer's goodbye
            raise error

        replacement.redial = redial
        replacement._run()
        lines = [record.getMessage() for record in caplog.records]
        assert lines == ["the link to beta needs new connections: nobody is there"] * num_told


def test_key_usage_counts_whole_records_and_calls_at_each_record_over_the_limit() -> None:
    calls: list[int] = []
    usage = KeyUsage(
        LinkOptions(replace_after_records=3, max_tls_records=6), lambda: calls.append(usage.num_records)
    )
    for _ in range(5):
        usage.add(1)
    assert calls == [3, 4, 5]
    with pytest.raises(LinkBroken, match="6 TLS records"):
        usage.add(1)


def test_the_limits_are_those_of_the_protocol_page() -> None:
    options = LinkOptions()
    assert (options.replace_after_records, options.max_tls_records) == (2**23, 2**24)
