"""A head that waits for its peers while the operator changes the roster."""

from __future__ import annotations

import threading

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.errors import LinkClosed
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.network import MemoryNetwork
from support.cluster import MEMBER, PeerThread
from support.members import later, make_local_members, membership_of
from support.waiting import wait_until


def test_a_head_waits_no_longer_for_a_member_that_was_taken_out() -> None:
    network = MemoryNetwork()
    alpha, beta, _ = make_local_members(("alpha", "beta", "gamma"))
    peer = PeerThread(beta, PeerOptions(MEMBER), network)
    me = membership_of(alpha)

    def take_gamma_out() -> None:
        me.offer(later(alpha.roster, without=["gamma"]), "the operator")

    try:
        cluster = RunningCluster.start(
            me,
            ModelSource.resolve("demo-mini"),
            HeadOptions(MEMBER, wait_s=600, num_blocks=64),
            network=network,
            watch=take_gamma_out,
        )
        try:
            assert [stage.member for stage in cluster.head.stages()] == ["alpha", "beta"]
            assert me.roster.epoch == 2
        finally:
            cluster.close()
    finally:
        peer.stop()


def test_who_came_is_greeted_while_the_head_still_waits_for_others() -> None:
    """Check that links are read: an unread link would end long before the head has waited enough."""
    network, over = MemoryNetwork(), threading.Event()
    alpha, beta, _ = make_local_members(("alpha", "beta", "gamma"))
    peer = PeerThread(beta, PeerOptions(MEMBER), network)

    def watch() -> None:
        if over.is_set():
            raise LinkClosed("the test is over")

    def start() -> None:
        options = HeadOptions(MEMBER, wait_s=600, num_blocks=64)
        source = ModelSource.resolve("demo-mini")
        with pytest.raises(LinkClosed):
            RunningCluster.start(membership_of(alpha), source, options, network=network, watch=watch)

    head = threading.Thread(target=start)
    head.start()
    try:
        wait_until(lambda: peer.peer.head is not None)
        assert head.is_alive()
    finally:
        over.set()
        head.join(20)
        peer.stop()
    assert not head.is_alive()
