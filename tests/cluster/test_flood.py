"""A valid member that floods a busy peer: it waits, and the head notices nothing."""

from __future__ import annotations

import threading

from convoy.cluster.options import PeerOptions
from convoy.cluster.peer.event import PeerEvent
from convoy.cluster.peer.peer import Peer
from convoy.errors import ConvoyError
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import ReceivedMessage
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import Hello, Sender, Step
from convoy.wire.tensor import WireTensor
from support.cluster import MEMBER
from support.links import End
from support.members import make_local_members, membership_of
from support.waiting import wait_until

WAIT_S = 60.0
SHARE_BYTES = 32 * 1024 * 1024
TENSOR = WireTensor("float32", (1024, 256), bytes(1 << 20))
HELLO = Hello("test", ["float32"], ["plain-f32"], 1 << 30, 1, "test")


def test_a_flood_of_hidden_states_fills_its_own_share_alone() -> None:
    alpha, beta, gamma = make_local_members(["alpha", "beta", "gamma"])
    network = MemoryNetwork()
    listening, go_on = threading.Event(), threading.Event()

    def watch(event: PeerEvent) -> None:
        if event.kind == "listening":
            listening.set()
        if event.kind == "head":
            go_on.wait(WAIT_S)  # the peer's loop is busy, as with a long step

    peer = Peer(membership_of(beta), PeerOptions(MEMBER), watch, network)
    running = threading.Thread(target=peer.run, args=(beta.member.address,), daemon=True)
    running.start()
    assert listening.wait(WAIT_S)
    head = End(network.dial(membership_of(alpha), beta.member, WAIT_S)).start(frames_from(Sender.PEER))
    head.link.send(HELLO)
    rogue = End(network.dial(membership_of(gamma), beta.member, WAIT_S)).start(frozenset())
    sent: list[int] = []

    def flood() -> None:
        try:
            for number in range(400):
                rogue.link.send_tensor(TENSOR, plan_id=1, step=number, boundary=1)
                sent.append(number)
        except ConvoyError:
            pass

    flooding = threading.Thread(target=flood, daemon=True)
    flooding.start()
    wait_until(lambda: peer.held_bytes("gamma") >= SHARE_BYTES - 2 * TENSOR.nbytes)
    num_sent = -1
    while num_sent != len(sent):  # until the flood stands
        num_sent = len(sent)
        flooding.join(0.3)
    assert flooding.is_alive()
    assert peer.held_bytes("gamma") <= SHARE_BYTES
    head.link.ping(WAIT_S)  # the head's receiver at the peer is not held up
    head.link.send(Step(0, [], [], [], b""), plan_id=1, step=0)
    wait_until(lambda: peer.held_bytes("alpha"))
    # Frames under way are in queues with bounds of their own; 400 MiB are not.
    assert len(sent) < 250
    go_on.set()
    answer = head.next()
    assert isinstance(answer, ReceivedMessage)
    assert isinstance(answer.message, Hello)
    for end in (rogue, head):
        end.link.close()
    flooding.join(WAIT_S)
    peer.stop()
    running.join(WAIT_S)
    assert not running.is_alive()
