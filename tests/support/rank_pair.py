"""Both ranks of a stage in one process, joined by sealed links in memory: a leader and a follower.

A follower's thread runs orders as a peer does, until it is told to stop. No other part of a member is
here: no plan, no bring-up and no recovery.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from convoy.engine.ranks.executor import RanksExecutor
from convoy.engine.ranks.follower import FollowerLoop, Order
from convoy.engine.ranks.leader import LeaderStage
from convoy.engine.ranks.sums.sealed import SealedCollective
from convoy.errors import ConvoyError
from convoy.model.collective import Collective
from convoy.model.stage import RankSlice
from convoy.testing.links import memory_link_pair
from convoy.transport.link.link import Link, Received, ReceivedTensor
from convoy.wire.messages.control import FrameType, StepFailed
from support.members import make_local_members

PLAN_ID = 7
WAIT_S = 20.0
_ORDERS = frozenset(
    {
        *(FrameType.PARTIAL, FrameType.RANK_STEP, FrameType.RANK_OUTPUT, FrameType.HIDDEN),
        *(FrameType.READ_BLOCKS, FrameType.WRITE_BLOCKS, FrameType.BLOCKS),
    }
)
_ANSWERS = frozenset({FrameType.PARTIAL, FrameType.BLOCKS, FrameType.BLOCKS_DONE, FrameType.STEP_FAILED})


@dataclass
class RankPair:
    """Hold both ranks. ``orders`` feeds the follower; None ends its thread, after the earlier orders."""

    leader: LeaderStage
    executor: RanksExecutor
    follower: FollowerLoop
    collectives: list[SealedCollective]
    links: tuple[Link, Link]
    orders: queue.SimpleQueue[Received | None] = field(default_factory=queue.SimpleQueue)
    failed: list[ConvoyError] = field(default_factory=list)

    def follow(self) -> threading.Thread:
        """Start to run the orders."""
        thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        thread.start()
        return thread

    def _follow(self) -> None:
        while (received := self.orders.get()) is not None:
            try:
                if isinstance(received, ReceivedTensor):
                    self.follower.accept_tensor(received)
                else:
                    self.follower.accept(self.links[1], cast(Order, received.message), received.plan_id)
            except ConvoyError as error:
                self.failed.append(error)
                failed = StepFailed(received.step, error.message)
                # The link itself may have failed.
                with contextlib.suppress(ConvoyError):
                    self.links[1].send(failed, plan_id=received.plan_id, step=received.step)


@contextmanager
def rank_pair(
    stages: Sequence[RankSlice[Collective]],
    *,
    num_kv_heads: int,
    num_blocks: int = 32,
    deadline_s: float = WAIT_S,
) -> Iterator[RankPair]:
    """Join two stages, rank 0's and rank 1's, which may be joined again later. No follower runs yet."""
    links = memory_link_pair(*make_local_members(["alpha", "beta"]))
    sums = [SealedCollective(rank, 2, {1 - rank: links[rank]}, PLAN_ID, deadline_s) for rank in (0, 1)]
    for stage, collective in zip(stages, sums, strict=True):
        stage.make_pools(num_blocks)
        stage.join(collective)
    leader = LeaderStage(
        stages[0],
        sums[0],
        {1: links[0]},
        plan_id=PLAN_ID,
        num_kv_heads=num_kv_heads,
        timeout_s=WAIT_S,
    )
    follower = FollowerLoop(stages[1], sums[1], PLAN_ID)
    pair = RankPair(leader, RanksExecutor(leader, PLAN_ID), follower, sums, links)
    _start(pair)
    try:
        yield pair
    finally:
        pair.orders.put(None)
        pair.executor.close()
        sums[1].abort(ConvoyError("the test is over"))
        for link in links:
            link.close()


def _start(pair: RankPair) -> None:
    def to_leader(link: Link, received: Received) -> None:
        if pair.collectives[0].deliver(link, received):
            return
        client = pair.leader.kv_client(link)
        if client is not None and client.expects(link, received):
            client.handle_answer(link, received)
        else:
            pair.executor.deliver(link, received)

    def to_follower(link: Link, received: Received) -> None:
        if not pair.collectives[1].deliver(link, received):
            pair.orders.put(received)

    def lost(link: Link, error: ConvoyError) -> None:
        pair.collectives[0].link_ended(link, error)
        pair.executor.lost(link, error)

    def ended(link: Link, error: Any) -> None:
        pair.collectives[1].link_ended(link, error)

    pair.links[0].start(to_leader, lost, _ANSWERS)
    pair.links[1].start(to_follower, ended, _ORDERS)
