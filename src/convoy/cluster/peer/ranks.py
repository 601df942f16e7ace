"""One member's end of a stage that several ranks hold: how the ranks connect, join and end.

1. Every rank has loaded its slice, and the head activates the plan.
2. Rank 0 dials the others. With more than two ranks, each also dials the next: a ring for sums.
3. All ranks send their `Agree` and compute one sum, within a deadline.
4. Then rank 0 takes part in the pipeline, and the others run its orders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from convoy.cluster.handlers import Handler
from convoy.config.table import MAX_RANKS
from convoy.engine.ranks.leader import LeaderStage
from convoy.engine.ranks.load import load_member_slice
from convoy.engine.ranks.rank_collective import prove
from convoy.engine.ranks.sums.sealed import SealedCollective
from convoy.engine.run.kv_client import KvClient
from convoy.errors import CollectiveError, ConvoyError, PeerRefused, StepError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.collective import Collective
from convoy.model.stage import LoadedStage, RankSlice, Stage, StageOptions
from convoy.plan.spec.sharding import Shard
from convoy.transport.link.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import FrameType, Plan, Refuse, Sender, StageAssignment, StepFailed
from convoy.wire.messages.ranks import Agree

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress

# Links to these members, made now; the frames that each of them may send.
Reach = Callable[[Mapping[str, frozenset[FrameType]]], dict[str, Link]]

# A rank's part of a long prompt may take that much longer than another's.
OPERATION_S = 60.0
# Messages that neighbours send, or relay for others, before this rank has joined.
_MAX_EARLY = 2 * MAX_RANKS


class RankPeers:
    """Connect the ranks of one stage in one plan.

    One thread calls `load` and `join`; receiver threads and others the rest.
    """

    def __init__(
        self, plan: Plan, digest: bytes, position: int, me: str, num_kv_heads: int, *, join_s: float
    ) -> None:
        """Prepare to join.

        ``num_kv_heads`` is that of the whole model's first cache group. ``join_s`` are the seconds from the
        activation until all ranks have computed one sum.
        """
        self.names = tuple(plan.stages[position].holders)
        self.rank = self.names.index(me)
        # Set at rank 0 once all ranks have joined.
        self.leader: LeaderStage | None = None
        # The reason why the ranks ended; None while they run.
        self.error: CollectiveError | None = None
        self._plan_id = plan.plan_id
        self._num_kv_heads = num_kv_heads
        self._join_s = join_s
        self._agree = Agree(
            plan.plan_id, self.rank, len(self.names), digest, plan.activation_dtype, plan.manifest
        )
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._early: list[tuple[Link, Received]] = []
        self._collective: SealedCollective | None = None
        self._slice: RankSlice[Collective] | None = None

    @property
    def collective(self) -> SealedCollective | None:
        """Return the collective; None before `join`."""
        return self._collective

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, len(self.names))

    @property
    def links(self) -> list[Link]:
        """Return the links to the ranks that are known by now."""
        with self._changed:
            return list(self._links.values())

    def is_leader(self, link: Link) -> bool:
        """Return whether ``link`` belongs to rank 0. The first link from that member counts."""
        if self.rank == 0 or link.peer != self.names[0]:
            return False
        with self._changed:
            return self._links.setdefault(0, link) is link

    # Threads of links.

    def kv_client(self, link: Link) -> KvClient | None:
        """Return the client that exchanges K/V over ``link``, if this is rank 0 and a rank is at its end."""
        return None if self.leader is None else self.leader.kv_client(link)

    def deliver_sum(self, link: Link, received: Received) -> bool:
        """Deliver an `Agree` or a part of a sum to the collective.

        Returns False if it is of another plan, or of a link that belongs to no rank. Raises `StepError` for
        a frame that comes too early.
        """
        if link.peer not in self.names or received.plan_id != self._plan_id:
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

    def note_failure(self, link: Link, received: Received) -> None:
        """End the collective if a rank says that it cannot go on: it takes no part in any later sum."""
        if received.plan_id != self._plan_id or not isinstance(received, ReceivedMessage):
            return
        if isinstance(received.message, StepFailed | Refuse) and link.peer in self.names:
            text = f"{link.peer} cannot go on: {received.message.reason}"
            self.abort(CollectiveError(text, rank=self.names.index(link.peer)))

    def ended(self, link: Link, error: ConvoyError) -> None:
        """Note that a link ended. If it was a rank's link, the collective ends too."""
        with self._changed:
            rank = next((rank for rank, known in self._links.items() if known is link), None)
        if rank is not None:
            text = f"the link to {link.peer}, rank {rank} of the stage, ended: {error.message}"
            self.abort(CollectiveError(text, rank=rank, public=f"the link to {link.peer} ended"))

    def abort(self, error: ConvoyError) -> None:
        """End the collective. Threads that wait for another rank here wake and raise `CollectiveError`."""
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
        """End the ranks with their plan."""
        self.abort(CollectiveError("the plan is over"))
        if self.leader is not None:
            self.leader.close()

    @property
    def culprit(self) -> str | None:
        """Return the member that ended the collective, as far as it is known."""
        return None if self.error is None else self.accused(self.error) or None

    def accused(self, error: ConvoyError) -> str:
        """Return the member that an error of the collective is about; empty for none, and for this member."""
        rank = error.rank if isinstance(error, CollectiveError) else None
        if rank is None or rank == self.rank or not 0 <= rank < len(self.names):
            return ""
        return self.names[rank]

    # The member's own thread.

    def load(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        progress: LoadProgress | None,
        *,
        before: LoadedStage | None,
    ) -> RankSlice[Collective]:
        """Load this member's slice of the stage, before `join`. Raises as `load_member_slice`."""
        self._slice = load_member_slice(source, assignment, options, self.shard, progress, before=before)
        return self._slice

    def join(self, known: Mapping[str, Link], reach: Reach) -> Stage:
        """Connect to the other ranks, check that all have the same plan, and return the stage to run.

        At rank 0 the returned stage stands for all ranks. ``known`` holds the links that exist already.
        Raises `CollectiveError`, and all that ``reach`` raises.
        """
        stage = self._slice
        assert stage is not None, "a slice is loaded before its rank joins"
        late = CollectiveError(f"the ranks of a stage did not find together within {self._join_s:g} s")
        timer = threading.Timer(self._join_s, self.abort, [late])
        timer.daemon = True
        timer.start()
        try:
            self._learn(known)
            self._learn(reach(self._to_dial(known)))
            collective = self.begin()
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
            plan_id=self._plan_id,
            num_kv_heads=self._num_kv_heads,
            timeout_s=OPERATION_S,
        )
        return self.leader

    def join_here(self, links: Mapping[str, Link]) -> Stage:
        """Join as `join` does, at a head, which has links to all ranks. Raises `PeerRefused`."""
        try:
            return self.join({name: links[name] for name in self.names[1:]}, lambda _names: {})
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
            return {name: frames_from(Sender.FOLLOWER) for name in self.names[1:] if name not in known}
        following = self.names[self.rank + 1 : self.rank + 2]
        return {name: frames_from(Sender.RANK) for name in following if name not in known}

    def begin(self) -> SealedCollective:
        """Wait for both neighbours in the ring of ranks, and return the collective over their links."""
        size = len(self.names)
        needed = {(self.rank - 1) % size, (self.rank + 1) % size}
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or needed <= self._links.keys())
            if self.error is not None:
                raise self.error
            links = {rank: self._links[rank] for rank in needed}
            collective = SealedCollective(self.rank, size, links, self._plan_id, OPERATION_S)
            # These messages came before the first sum, so no thread waits for them yet.
            for link, received in self._early:
                collective.deliver(link, received)
            self._early.clear()
            self._collective = collective
        return collective


class RankHandlers:
    """Handle the frames of the other ranks of this member's stage, on receiver threads.

    ``ranks`` returns the ranks of the plan; None if this member holds its stage alone. A frame that is not
    for them goes to ``otherwise``.
    """

    def __init__(self, ranks: Callable[[], RankPeers | None], otherwise: Handler) -> None:
        self._ranks = ranks
        self._otherwise = otherwise

    def handle_sum(self, link: Link, received: Received) -> None:
        """Deliver an `Agree` or a part of a sum. Raises as `RankPeers.deliver_sum` does."""
        ranks = self._ranks()
        if ranks is None or not ranks.deliver_sum(link, received):
            self._otherwise(link, received)

    def handle_kv(self, link: Link, received: Received) -> None:
        """Hand K/V, or the end of a writing, to the exchange that waits for it."""
        ranks = self._ranks()
        client = None if ranks is None else ranks.kv_client(link)
        if client is not None and client.expects(link, received):
            client.handle_answer(link, received)
        else:
            self._otherwise(link, received)

    def handle_failure(self, link: Link, received: Received) -> None:
        """Note that a member failed, and hand its report to ``otherwise`` too."""
        ranks = self._ranks()
        if ranks is not None:
            ranks.note_failure(link, received)
        self._otherwise(link, received)
