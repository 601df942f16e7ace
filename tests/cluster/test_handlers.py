"""The table of handlers of each side, and the refusal of each frame that its sender may not send."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from convoy.cluster.handlers import HandlerTable, on, on_frame
from convoy.cluster.head.head import Head
from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.peer.peer import Peer
from convoy.errors import FrameError
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.links import memory_link_pair
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.wire.frame import TENSOR_TYPES, frames_from
from convoy.wire.messages.control import FrameType, Sender
from convoy.wire.messages.link import Ping, Pong
from convoy.wire.messages.ranks import RankStep
from convoy.wire.messages.types import MESSAGE_TYPES
from convoy.wire.tensor import WireTensor
from support.cluster import MEMBER
from support.links import End
from support.members import make_local_members, membership_of
from support.sample_values import sample

TENSOR = WireTensor("float32", (1,), bytes(4))
# A member that dials may be the predecessor or rank 0.
DIALLER = Sender.PREDECESSOR | Sender.LEADER
TO_PEER = Sender.HEAD | DIALLER | Sender.FOLLOWER | Sender.RANK
SENDERS = (Sender.HEAD, Sender.PEER, DIALLER, Sender.FOLLOWER, Sender.RANK)
SEALED = (*MESSAGE_TYPES, *sorted(TENSOR_TYPES))


def send(link: Link, kind: FrameType) -> None:
    if kind in TENSOR_TYPES:
        link.send_tensor(TENSOR, plan_id=1, step=1, boundary=1, kind=kind)
        return
    message = sample(MESSAGE_TYPES[kind])
    if isinstance(message, RankStep):
        # Sampling is rank 0's own work.
        message = replace(message, step=replace(message.step, samples=[]))
    link.send(message, plan_id=1, step=1)


def test_a_head_has_a_handler_for_each_frame_that_a_peer_may_send_and_for_no_other() -> None:
    (alpha,) = make_local_members(["alpha"])
    head = Head(membership_of(alpha), ModelSource.resolve("demo-mini"), HeadOptions(MEMBER), MemoryNetwork())
    assert head.handlers.types == frames_from(Sender.PEER)
    head.close()


def test_a_peer_has_a_handler_for_each_frame_that_its_neighbours_may_send_and_for_no_other() -> None:
    (beta,) = make_local_members(["beta"])
    peer = Peer(membership_of(beta), PeerOptions(MEMBER), network=MemoryNetwork())
    assert peer.handlers.types == frames_from(TO_PEER)


def test_every_message_is_for_a_head_a_peer_or_the_link_itself() -> None:
    assert frames_from(Sender.PEER | TO_PEER) | frames_from(Sender.LINK) == frozenset(SEALED)
    assert not frames_from(Sender.PEER | TO_PEER) & frames_from(Sender.LINK)


@pytest.mark.parametrize("sender", SENDERS, ids=str)
def test_each_frame_that_a_sender_may_not_send_ends_its_link(sender: Sender) -> None:
    members = make_local_members(["alpha", "beta"])
    allowed = frames_from(sender | Sender.LINK)
    assert set(SEALED) - allowed
    for kind in SEALED:
        if kind in allowed:
            continue
        mine, theirs = memory_link_pair(*members)
        receiving = End(theirs).start(frames_from(sender))
        End(mine).start()
        send(mine, kind)
        error = receiving.error()
        assert isinstance(error, FrameError)
        assert error.message == f"the peer sent {kind.name}, which it may not send here"
        assert receiving.arrived.empty()
        mine.close()


@pytest.mark.parametrize("sender", SENDERS, ids=str)
def test_each_frame_that_a_sender_may_send_arrives(sender: Sender) -> None:
    mine, theirs = memory_link_pair(*make_local_members(["alpha", "beta"]))
    receiving = End(theirs).start(frames_from(sender))
    End(mine).start()
    for kind in sorted(frames_from(sender)):
        send(mine, kind)
        received = receiving.next()
        assert kind is (
            received.kind if isinstance(received, ReceivedTensor) else received.message.frame.type
        )
    mine.close()


def test_a_frame_goes_to_its_own_handler() -> None:
    link, other = memory_link_pair(*make_local_members(["alpha", "beta"]))
    heard: list[object] = []
    table = HandlerTable(
        [
            on(Ping, lambda _link, ping: heard.append(ping)),
            *on_frame(Pong, FrameType.HIDDEN, handle=lambda _link, received: heard.append(received)),
        ]
    )
    frames: list[Received] = [
        ReceivedMessage(1, 2, Ping(3)),
        ReceivedMessage(1, 2, Pong(4)),
        ReceivedTensor(1, 2, 0, TENSOR),
    ]
    for received in frames:
        table.handle(link, received)
    assert heard == [Ping(3), *frames[1:]]
    for end in (link, other):
        end.close()


def test_a_frame_without_a_handler_ends_its_link() -> None:
    mine, theirs = memory_link_pair(*make_local_members(["alpha", "beta"]))
    sending = End(mine).start()
    theirs.start(HandlerTable([]).handle, lambda *_: None, frames_from(Sender.HEAD))
    send(mine, FrameType.HIDDEN)
    assert "this member has no use for a HIDDEN" in sending.error().message


def test_two_handlers_of_one_frame_are_refused() -> None:
    with pytest.raises(AssertionError, match="a PING has two handlers"):
        HandlerTable(on_frame(Ping, Ping, handle=lambda *_: None))
