"""One member's end of a stage that several hold: who the others are, how they find together, and its end.

1. every rank has loaded its slice; the head activates the plan
2. rank 0 dials the others, and beyond two ranks each dials the next: a ring for sums
3. all ranks say what they are here for, and add up once, within a deadline
4. then rank 0 takes part in the pipeline, and the others run what it orders
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from convoy.cluster.rights import FROM_FOLLOWER, FROM_RANK
from convoy.engine.ranks.leader import LeaderStage
from convoy.engine.ranks.protocol import prove
from convoy.engine.ranks.sums.sealed import SealedCollective
from convoy.errors import CollectiveError, ConvoyError, PeerRefused, StepError
from convoy.model.backends.host.stage import Stage
from convoy.plan.spec.sharding import Shard
from convoy.transport.link.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.wire.messages.control import MAX_RANKS, FrameType, Plan, Refuse, StepFailed
from convoy.wire.messages.ranks import Agree

# Links to these members, made now; the frames that each of them may send.
Reach = Callable[[Mapping[str, frozenset[FrameType]]], dict[str, Link]]

JOIN_S = 15.0  # from the activation until all ranks have added up once
OPERATION_S = 60.0  # a rank's part of a long prompt may take that much longer than another's
_MAX_EARLY = 2 * MAX_RANKS  # what neighbours say, and pass on of others, before this rank is there


class RankPeers:
    """Of one plan generation. One thread calls `join`; receiver threads and others the rest."""

    def __init__(self, plan: Plan, digest: bytes, position: int, me: str, num_kv_heads: int) -> None:
        """``num_kv_heads``: of the whole model's first cache group."""
        self.names = tuple(plan.stages[position].holders)
        self.rank = self.names.index(me)
        self.leader: LeaderStage | None = None  # at rank 0, once they have joined
        self.error: CollectiveError | None = None  # why it is over
        self._generation = plan.generation
        self._num_kv_heads = num_kv_heads
        self._agree = Agree(
            plan.generation, self.rank, len(self.names), digest, plan.activation_dtype, plan.manifest
        )
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._early: list[tuple[Link, Received]] = []
        self._collective: SealedCollective | None = None

    @property
    def collective(self) -> SealedCollective | None:
        """None before `join`."""
        return self._collective

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, len(self.names))

    @property
    def links(self) -> list[Link]:
        """To the ranks that are known by now."""
        with self._changed:
            return list(self._links.values())

    def is_leader(self, link: Link) -> bool:
        """Whether it is the one of rank 0; the first from that member counts."""
        if self.rank == 0 or link.peer != self.names[0]:
            return False
        with self._changed:
            return self._links.setdefault(0, link) is link

    # Threads of links.

    def takes(self, link: Link, received: Received) -> bool:
        """Whether it is for the collective, or a rank's answer. Raises `StepError` for nonsense."""
        leader = self.leader
        if leader is not None and leader.takes(link, received):
            return True
        self._heed(link, received)
        if not _is_sum(received) or link.peer not in self.names or received.generation != self._generation:
            return False
        with self._changed:
            rank = self.names.index(link.peer)
            if self._links.setdefault(rank, link) is not link:
                return False
            collective = self._collective
            if collective is None and self.error is None:
                if isinstance(received, ReceivedTensor) or len(self._early) >= _MAX_EARLY:
                    raise StepError(f"{link.peer} does not wait until all ranks are there")
                self._early.append((link, received))
                self._changed.notify_all()
        return collective is None or collective.deliver(link, received)

    def _heed(self, link: Link, received: Received) -> None:
        """A rank that says it cannot go on does no part of any sum."""
        if received.generation != self._generation or not isinstance(received, ReceivedMessage):
            return
        if isinstance(received.message, StepFailed | Refuse) and link.peer in self.names:
            text = f"{link.peer} cannot go on: {received.message.reason}"
            self.abort(CollectiveError(text, rank=self.names.index(link.peer)))

    def ended(self, link: Link, error: ConvoyError) -> None:
        """A link is over: if it is a rank's, so are they all."""
        with self._changed:
            rank = next((rank for rank, known in self._links.items() if known is link), None)
        if rank is not None:
            text = f"the link to {link.peer}, rank {rank} of the stage, ended: {error.message}"
            self.abort(CollectiveError(text, rank=rank, public=f"the link to {link.peer} ended"))

    def abort(self, error: ConvoyError) -> None:
        """It is over. Whoever waits for another rank here wakes, and raises `CollectiveError`."""
        with self._changed:
            if self.error is None:
                own = isinstance(error, CollectiveError)
                self.error = error if own else CollectiveError(error.message, hint=error.hint)  # type: ignore[assignment]
            collective, leader = self._collective, self.leader
            self._early.clear()
            self._changed.notify_all()
        if collective is not None:
            collective.abort(error)
        if leader is not None:
            leader.abort(error)

    def close(self) -> None:
        """The plan is over."""
        self.abort(CollectiveError("the plan is over"))
        if self.leader is not None:
            self.leader.close()

    @property
    def culprit(self) -> str | None:
        """The member because of which it is over, as far as that is known."""
        return None if self.error is None else self.accused(self.error) or None

    def accused(self, error: ConvoyError) -> str:
        """The member that an error of the collective is about; empty for none, and for this one."""
        rank = error.rank if isinstance(error, CollectiveError) else None
        if rank is None or rank == self.rank or not 0 <= rank < len(self.names):
            return ""
        return self.names[rank]

    # The member's own thread.

    def join(
        self, stage: Stage, known: Mapping[str, Link], reach: Reach, within_s: float | None = None
    ) -> Stage:
        """Find the others, and see that all are here for the same: the stage to run, which at rank 0 is all
        of theirs.

        ``known``: links that are there already. Raises `CollectiveError`, or what ``reach`` raises.
        """
        within_s = JOIN_S if within_s is None else within_s
        late = CollectiveError(f"the ranks of a stage did not find together within {within_s:g} s")
        timer = threading.Timer(within_s, self.abort, [late])
        timer.daemon = True
        timer.start()
        try:
            self._learn(known)
            self._learn(reach(self._to_dial(known)))
            collective = self._begin()
            collective.agree(self._agree)
            prove(collective)
            collective.rest()
        except ConvoyError as error:
            self.abort(error)
            raise
        finally:
            timer.cancel()
        stage.join(collective)
        if self.rank > 0:
            return stage
        self.leader = LeaderStage(
            stage,
            collective,
            dict(self._links),
            generation=self._generation,
            num_kv_heads=self._num_kv_heads,
            timeout_s=OPERATION_S,
        )
        return self.leader.as_stage()

    def join_here(self, stage: Stage, links: Mapping[str, Link]) -> Stage:
        """As `join`, at a head, which has links to all. Raises `PeerRefused`."""
        try:
            return self.join(stage, {name: links[name] for name in self.names[1:]}, lambda _names: {})
        except CollectiveError as error:
            raise PeerRefused(
                f"the ranks of a stage did not come together: {error.message}",
                hint=error.hint or "with --parallel pipeline each member holds whole layers",
            ) from error

    def _learn(self, links: Mapping[str, Link]) -> None:
        with self._changed:
            for name, link in links.items():
                if name in self.names:
                    self._links[self.names.index(name)] = link
        for link in links.values():
            if link.is_over:
                self.ended(link, StepError("it ended before the ranks found together"))

    def _to_dial(self, known: Mapping[str, Link]) -> dict[str, frozenset[FrameType]]:
        if self.rank == 0:
            return {name: FROM_FOLLOWER for name in self.names[1:] if name not in known}
        following = self.names[self.rank + 1 : self.rank + 2]
        return {name: FROM_RANK for name in following if name not in known}

    def _begin(self) -> SealedCollective:
        """Once both neighbours in the ring are there."""
        size = len(self.names)
        needed = {(self.rank - 1) % size, (self.rank + 1) % size}
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or needed <= self._links.keys())
            if self.error is not None:
                raise self.error
            links = {rank: self._links[rank] for rank in needed}
            collective = SealedCollective(self.rank, size, links, self._generation, OPERATION_S)
            for link, received in self._early:  # nothing of it waits: it is of before the first sum
                collective.deliver(link, received)
            self._early.clear()
            self._collective = collective
        return collective


def _is_sum(received: Received) -> bool:
    if isinstance(received, ReceivedTensor):
        return received.kind is FrameType.PARTIAL
    return isinstance(received.message, Agree)
