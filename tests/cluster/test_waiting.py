"""A head that waits for its peers while the operator changes the roster."""

from __future__ import annotations

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.model.source import ModelSource
from convoy.transport.network import MemoryNetwork
from support.cluster import MEMBER, PeerThread
from support.members import later, make_local_members, membership_of


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
