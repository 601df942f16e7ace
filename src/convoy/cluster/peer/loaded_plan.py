"""A plan as one peer holds it: checked, loaded, and once active, a place in the ring with two neighbours."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import partial

from convoy.cluster.options import MemberOptions, PeerOptions
from convoy.cluster.peer.ranks import RankPeers, Reach
from convoy.cluster.weights.peer_weights import Asker, PeerWeights
from convoy.engine.ranks.follower import FollowerLoop, Order
from convoy.engine.ranks.load_stage import load_stage
from convoy.engine.run.device_sender import Failed
from convoy.engine.run.kv_server import MAX_REASON, KvServer
from convoy.engine.run.stage_worker import StageRoute, StageWorker
from convoy.engine.stats import Histogram
from convoy.errors import CollectiveError, ConvoyError, HiddenError, Incompatible, StepError
from convoy.model.backends.host.stage import Stage, StageOptions
from convoy.model.device import stage_device
from convoy.plan.spec.model import ModelSpec
from convoy.transport.link.link import Link, Received
from convoy.wire.messages.control import Activate, Hello, Plan, StageAssignment, StepFailed

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedPlan:
    """``loop``, ``keeper``, ``successor`` and ``predecessor`` are None until the plan is active.

    The predecessor's link is known with its first hidden state; a predecessor that is the head uses the
    head's link.
    """

    plan: Plan
    digest: bytes
    stage: Stage
    position: int
    room_bytes: int
    loop: StageWorker | None = None
    keeper: KvServer | None = None
    successor: Link | None = None
    predecessor: Link | None = None
    group: RankPeers | None = None  # where other members hold the stage too
    follower: FollowerLoop | None = None  # instead of a loop, where another of them is rank 0
    step_s: Histogram | None = None  # of this member, over all its plans

    @property
    def assignment(self) -> StageAssignment:
        return self.plan.stages[self.position]

    @property
    def successor_name(self) -> str:
        return self.plan.stages[(self.position + 1) % len(self.plan.stages)].member

    @property
    def predecessor_name(self) -> str | None:
        """None for the stage that owns the embedding, which starts each step, and for a rank that follows."""
        return self.plan.stages[self.position - 1].member if self.position and self.leads else None

    @property
    def leads(self) -> bool:
        """Whether this member takes part in the ring: alone with its stage, or as rank 0."""
        return self.group is None or self.group.rank == 0

    @property
    def finished_step(self) -> int:
        """The last step that was run and sent on; -1 for none."""
        loop = self.loop or self.follower
        return -1 if loop is None else loop.finished_step

    def begin(self, activate: Activate, head: Link, reach: Reach, failed: Failed) -> None:
        """Find the other ranks and the successor, then as `activate`; what runs has ``head`` as its keeper's.

        Raises also what ``reach`` raises, and `CollectiveError`.
        """
        generation, following = self.plan.generation, self.successor_name
        if not self.leads:
            self._follow(activate, head, reach)
            return
        found = {} if following == head.peer else reach({following: frozenset()})
        self.successor = successor = found.get(following, head)
        stage = self.stage
        if self.group is not None:
            stage = self.group.join(self.stage, {}, reach)
        self.activate(activate, head.peer, successor, failed, stage)
        self.keeper = KvServer(stage, head, generation)
        if self.predecessor_name == head.peer:
            self.predecessor = head

    def _follow(self, activate: Activate, head: Link, reach: Reach) -> None:
        assert self.group is not None, "who follows is one of several"
        self._make_pools(activate, head.peer)
        known = {head.peer: head} if head.peer == self.group.names[0] else {}
        self.group.join(self.stage, known, reach)
        assert self.group.collective is not None
        self.follower = FollowerLoop(*(self.stage, self.group.collective, self.plan.generation), self.step_s)

    def activate(
        self,
        activate: Activate,
        head: str,
        successor: Link,
        failed: Failed = lambda _step, _error: None,
        stage: Stage | None = None,
    ) -> StageWorker:
        """Make the pools and take the place in the ring. Raises `StepError` for what was not offered.

        ``failed``: see `StageWorker`. ``stage``: what runs, where other ranks run with it.
        """
        self._make_pools(activate, head)
        stage, stages = stage or self.stage, self.plan.stages
        route = StageRoute(
            generation=self.plan.generation,
            assignment=self.assignment,
            predecessor=self.predecessor_name,
            last=stages[0].member == head and self.position == len(stages) - 1,
            activation_dtype=self.plan.activation_dtype,
            overlaps=stage.overlaps,
        )
        self.successor = successor
        self.loop = StageWorker(stage, route, successor, failed, self.step_s)
        return self.loop

    def _make_pools(self, activate: Activate, head: str) -> None:
        self._check_head(head)
        # a count below 1 is refused with the pools, and makes no room for others
        pairs = zip(activate.num_blocks, self.stage.block_bytes, strict=False)
        asked = sum(max(0, count) * size for count, size in pairs)
        if asked > self.room_bytes:
            raise StepError(f"the head asks for {asked} bytes of K/V, and {self.room_bytes} were offered")
        self.stage.make_pools(activate.num_blocks)

    def _check_head(self, head: str) -> None:
        """The ring begins or ends with the head; who owns the output follows from that."""
        first, last = self.plan.stages[0], self.plan.stages[-1]
        if head not in (first.member, last.member):
            raise StepError(f"{head} leads this plan, expected it to have the first stage or the last")
        owner = first if first.output else last
        if owner.member != head and owner is not last:
            raise StepError(f"the plan has the output on {owner.member}, expected {head} or the last stage")

    def is_neighbour(self, link: Link) -> bool:
        """Whether the ring, or the group of ranks, needs this very link."""
        return link in self.neighbours()

    def neighbours(self) -> list[Link]:
        ring = [link for link in (self.successor, self.predecessor) if link is not None]
        return ring if self.group is None else [*ring, *self.group.links]

    def is_led_by(self, link: Link, generation: int) -> bool:
        """Whether it is the link of rank 0 of the stage, where this member follows.

        One that its member made for a plan that is over is not: it ends, and must not end this plan too.
        """
        if self.group is None or generation != self.plan.generation:
            return False
        return self.group.is_leader(link)

    def obey(self, leader: Link, order: Order, generation: int) -> None:
        """An order of rank 0. Raises as `FollowerLoop.accept`, and `StepError` before the plan is active."""
        if self.follower is None:
            raise StepError(f"{type(order).__name__} came before a plan was active")
        self.follower.accept(leader, order, generation)

    @property
    def is_active(self) -> bool:
        return self.loop is not None or self.follower is not None

    def accused(self, error: ConvoyError) -> str:
        """Which neighbour in the ring, or other rank, an error is about; empty for this member itself."""
        if isinstance(error, CollectiveError) and self.group is not None:
            return self.group.accused(error)
        before = self.predecessor_name if self.leads else (self.group.names[0] if self.group else None)
        return before if before is not None and isinstance(error, HiddenError) else ""

    def close(self) -> None:
        """The plan is over: nothing more is sent, and the K/V is free."""
        if self.loop is not None:
            self.loop.close()
        if self.group is not None:
            self.group.close()
        self.stage.forget()

    # Threads of links.

    def takes(self, link: Link, received: Received) -> bool:
        """Whether it is between ranks, and never waits behind other work."""
        return self.group is not None and self.group.takes(link, received)

    def ended(self, link: Link, error: ConvoyError) -> None:
        """A link is over: no rank waits for what was to come on it."""
        if self.group is not None:
            self.group.ended(link, error)

    def end(self, error: ConvoyError) -> None:
        """Another plan is here, or nobody wants this one: no rank waits for another."""
        if self.group is not None:
            self.group.abort(error)


def load_plan(
    plan: Plan,
    digest: bytes,
    *,
    me: str,
    hello: Hello,
    options: PeerOptions,
    weights: PeerWeights,
    asker: Asker,
    before: Stage | None = None,
) -> LoadedPlan:
    """Check a plan against this member's offer, and load its stage; ``before`` is what the last plan left.

    ``weights`` finds the model, and gets for ``asker`` what is missing of it here. Raises `Incompatible`,
    `ModelError`, or `StepError` for stages that make no whole model.
    """
    position = next((i for i, stage in enumerate(plan.stages) if me in stage.holders), None)
    if position is None:
        raise Incompatible(f"the plan has no stage for {me}")
    if len(plan.kernels) not in {0, len(plan.stages)}:
        raise StepError(f"the plan names {len(plan.kernels)} kernels for {len(plan.stages)} stages")
    kernel = plan.kernel_of(position)
    if kernel not in hello.kernels or plan.activation_dtype not in hello.dtypes:
        raise Incompatible(
            f"the plan asks for {kernel} and {plan.activation_dtype}, but {me} has "
            f"{', '.join(hello.kernels)} and {', '.join(hello.dtypes)}"
        )
    found = weights.find(asker)
    source = found.source
    check_plan(plan, source.spec.num_layers, source.spec.max_context)
    weights.make_ready(asker, found, plan.stages[position])
    chosen = stage_options(plan, position, options.member)
    progress = partial(asker.tell, "")
    group = group_of(plan, digest, position, me, source.spec)
    shard = None if group is None else group.shard
    stage = load_stage(source, plan.stages[position], chosen, progress, before=before, shard=shard)
    room = stage.room_bytes(hello.memory_bytes)
    return LoadedPlan(plan, digest, stage, position, max(0, room), group=group)


def group_of(plan: Plan, digest: bytes, position: int, me: str, spec: ModelSpec) -> RankPeers | None:
    """Who holds a stage together with this member; None where it holds it alone."""
    if plan.stages[position].world_size == 1:
        return None
    return RankPeers(plan, digest, position, me, spec.cache_groups[0].num_kv_heads)


def stage_options(plan: Plan, position: int, member: MemberOptions) -> StageOptions:
    """How the stage at ``position`` computes on this member. Raises `UsageError` as `choose_devices` does."""
    return StageOptions(
        kernel=plan.kernel_of(position),
        block_size=plan.block_size,
        device=stage_device(member.device, member.kernel),
        num_threads=member.num_threads,
    )


def check_plan(plan: Plan, num_layers: int, max_context: int) -> None:
    """Each layer once, in order; the first stage embeds, one owns the output. Raises `StepError`."""
    reached = 0
    for stage in plan.stages:
        if not stage.start == reached < stage.end <= num_layers:
            raise StepError(
                f"a stage of the plan has layers [{stage.start}, {stage.end}), expected to begin at "
                f"{reached} and to end by {num_layers}"
            )
        reached = stage.end
    if reached != num_layers:
        raise StepError(f"the plan's stages end at layer {reached}, and the model has {num_layers}")
    _check_holders(plan)
    owners = sum(stage.output for stage in plan.stages)
    if [stage.embed for stage in plan.stages] != [True, *[False] * (len(plan.stages) - 1)] or owners != 1:
        raise StepError(f"the plan's first stage must embed and one own the output, and {owners} do")
    if not (plan.stages[0].output or plan.stages[-1].output):
        raise StepError("a stage in the middle of the plan owns the output, expected the first or the last")
    if not 1 <= plan.max_context <= max_context:
        raise StepError(f"the plan's context of {plan.max_context} tokens is not in [1, {max_context}]")


def _check_holders(plan: Plan) -> None:
    """Nobody has two places, and the first of a stage's ranks is its member."""
    for stage in plan.stages:
        if stage.ranks and (stage.world_size < 2 or stage.ranks[0] != stage.member):
            raise StepError(
                f"the stage of {stage.member} has {len(stage.ranks)} ranks from {stage.ranks[0]} on, "
                f"expected {stage.member} and others"
            )
    holders = [name for stage in plan.stages for name in stage.holders]
    if len(set(holders)) != len(holders):
        raise StepError("a member has two stages of the plan, or two ranks")


def could_not_leave(head: Link, generation: int, step: int, error: ConvoyError) -> None:
    """A step that a device ran, or could not: on the thread that waits for devices."""
    _log.warning("step %d could not leave: %s", step, error.message)
    with contextlib.suppress(ConvoyError):  # then the head's link ends too, and says so itself
        head.send(StepFailed(step, error.message[:MAX_REASON]), generation=generation, step=step)
