"""A plan as one peer holds it: checked and loaded.

Once active, it is a place in the ring with two neighbours.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import partial

from convoy.cluster.offer import require_kv
from convoy.cluster.options import MemberOptions, PeerOptions
from convoy.cluster.peer.ranks import RankPeers, Reach
from convoy.cluster.weights.peer_weights import Asker, PeerWeights
from convoy.engine.ranks.follower import FollowerLoop, Order
from convoy.engine.ranks.load import load_member_stage
from convoy.engine.run.kv_server import MAX_REASON, KvServer
from convoy.engine.run.stage_worker import Failed, StageRoute, StageWorker
from convoy.engine.stats import Histogram
from convoy.errors import CollectiveError, ConvoyError, HiddenError, Incompatible, StepError
from convoy.model.backends.registry import why_not_on_mlx
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import or_host, stage_device
from convoy.model.stage import LoadedStage, Stage, StageOptions
from convoy.plan.spec.model import ModelSpec
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Activate, Hello, Plan, StageAssignment, StageMarks, StepFailed

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedPlan:
    """Hold one plan, its stage on this member, and the links to its neighbours.

    ``loop``, ``kv_server``, ``successor`` and ``predecessor`` are None until the plan is active.
    The predecessor's link is known with its first hidden state. A predecessor that is the head uses the
    head's link.
    """

    plan: Plan
    digest: bytes
    stage: LoadedStage
    position: int
    room_bytes: int
    loop: StageWorker | None = None
    kv_server: KvServer | None = None
    successor: Link | None = None
    predecessor: Link | None = None
    # Set if other members hold the stage too.
    ranks: RankPeers | None = None
    # Set instead of ``loop`` if another member is rank 0 of the stage.
    follower: FollowerLoop | None = None
    # Step times of this member over all its plans.
    step_s: Histogram | None = None

    @property
    def assignment(self) -> StageAssignment:
        return self.plan.stages[self.position]

    @property
    def successor_name(self) -> str:
        return self.plan.stages[(self.position + 1) % len(self.plan.stages)].member

    @property
    def predecessor_name(self) -> str | None:
        """Return the previous member of the ring.

        None for the stage that owns the embedding, because it starts each step, and for a rank above 0.
        """
        return self.plan.stages[self.position - 1].member if self.position and self.leads else None

    @property
    def leads(self) -> bool:
        """Return whether this member takes part in the ring: alone with its stage, or as rank 0."""
        return self.ranks is None or self.ranks.rank == 0

    @property
    def finished_step(self) -> int:
        """Return the last step that was run and sent on; -1 for none."""
        loop = self.loop or self.follower
        return -1 if loop is None else loop.finished_step

    def marks(self) -> list[StageMarks]:
        """Return the times of the last steps here; none at a rank that follows another."""
        return [] if self.loop is None else self.loop.log.answer()

    def begin(self, activate: Activate, head: Link, reach: Reach, failed: Failed) -> None:
        """Connect to the other ranks and to the successor, then activate the plan as `activate` does.

        ``head`` is the link that K/V requests come from. Raises also `CollectiveError` and all that
        ``reach`` raises.
        """
        plan_id, following = self.plan.plan_id, self.successor_name
        if not self.leads:
            self._follow(activate, head, reach)
            return
        # The head dialled this member, so the ring reuses its link instead of a second one.
        found = {} if following == head.peer else reach({following: frozenset()})
        self.successor = successor = found.get(following, head)
        stage: Stage = self.stage
        if self.ranks is not None:
            stage = self.ranks.join({}, reach)
        self.activate(activate, head.peer, successor, failed, stage)
        self.kv_server = KvServer(stage, head, plan_id)
        if self.predecessor_name == head.peer:
            self.predecessor = head

    def _follow(self, activate: Activate, head: Link, reach: Reach) -> None:
        assert self.ranks is not None, "a follower is one of several ranks"
        self._make_pools(activate, head.peer)
        known = {head.peer: head} if head.peer == self.ranks.names[0] else {}
        self.ranks.join(known, reach)
        assert self.ranks.collective is not None
        self.follower = FollowerLoop(*(self.stage, self.ranks.collective, self.plan.plan_id), self.step_s)

    def activate(
        self,
        activate: Activate,
        head: str,
        successor: Link,
        failed: Failed = lambda _step, _error: None,
        stage: Stage | None = None,
    ) -> StageWorker:
        """Make the pools and take the place in the ring.

        ``failed``: see `StageWorker`. ``stage`` is the stage to run if other ranks run with it.
        Raises `StepError` if the head asks for more memory than this member offered.
        """
        self._make_pools(activate, head)
        stage, stages = stage or self.stage, self.plan.stages
        route = StageRoute(
            plan_id=self.plan.plan_id,
            assignment=self.assignment,
            predecessor=self.predecessor_name,
            last=stages[0].member == head and self.position == len(stages) - 1,
            activation_dtype=self.plan.activation_dtype,
            overlaps=stage.overlaps,
        )
        self.successor = successor
        observe_s = self.step_s.observe if self.step_s is not None else (lambda _seconds: None)
        self.loop = StageWorker(stage, route, successor, failed, observe_s)
        return self.loop

    def _make_pools(self, activate: Activate, head: str) -> None:
        self._check_head(head)
        # `make_pools` refuses a count below 1. Here it counts as 0, so that it frees no room for others.
        pairs = zip(activate.num_blocks, self.stage.block_bytes, strict=False)
        asked = sum(max(0, count) * size for count, size in pairs)
        if asked > self.room_bytes:
            raise StepError(f"the head asks for {asked} bytes of K/V, and {self.room_bytes} were offered")
        self.stage.make_pools(activate.num_blocks)

    def _check_head(self, head: str) -> None:
        """Check that ``head`` has the first or the last stage, and that it or the last stage has the output.

        Raises `StepError`.
        """
        first, last = self.plan.stages[0], self.plan.stages[-1]
        if head not in (first.member, last.member):
            raise StepError(f"{head} leads this plan, expected it to have the first stage or the last")
        owner = first if first.output else last
        if owner.member != head and owner is not last:
            raise StepError(f"the plan has the output on {owner.member}, expected {head} or the last stage")

    def is_neighbour(self, link: Link) -> bool:
        """Return whether the ring, or the ranks of the stage, need this very link."""
        return link in self.neighbours()

    def neighbours(self) -> list[Link]:
        ring = [link for link in (self.successor, self.predecessor) if link is not None]
        return ring if self.ranks is None else [*ring, *self.ranks.links]

    def is_led_by(self, link: Link, plan_id: int) -> bool:
        """Return whether ``link`` belongs to rank 0 of the stage and this member follows it.

        A link that rank 0 made for an earlier plan does not count: it is about to end, and must not end
        this plan too.
        """
        if self.ranks is None or plan_id != self.plan.plan_id:
            return False
        return self.ranks.is_leader(link)

    def obey(self, leader: Link, order: Order, plan_id: int) -> None:
        """Queue an order of rank 0.

        Raises as `FollowerLoop.accept` does, and `StepError` before the plan is active.
        """
        if self.follower is None:
            raise StepError(f"{type(order).__name__} came before a plan was active")
        self.follower.accept(leader, order, plan_id)

    @property
    def is_active(self) -> bool:
        return self.loop is not None or self.follower is not None

    def accused(self, error: ConvoyError) -> str:
        """Return the neighbour or rank that an error is about; empty if it is about this member itself."""
        if isinstance(error, CollectiveError) and self.ranks is not None:
            return self.ranks.accused(error)
        before = self.predecessor_name if self.leads else (self.ranks.names[0] if self.ranks else None)
        return before if before is not None and isinstance(error, HiddenError) else ""

    def close(self) -> None:
        """End the plan: send nothing more and free the K/V."""
        if self.loop is not None:
            self.loop.close()
        if self.ranks is not None:
            self.ranks.close()
        self.stage.forget()

    # Threads of links.

    def ended(self, link: Link, error: ConvoyError) -> None:
        """Note that a link ended, so that no rank waits for frames on it."""
        if self.ranks is not None:
            self.ranks.ended(link, error)

    def end(self, error: ConvoyError) -> None:
        """End the waits between ranks, because another plan came or this one is not wanted any more."""
        if self.ranks is not None:
            self.ranks.abort(error)


def load_plan(
    plan: Plan,
    digest: bytes,
    *,
    me: str,
    hello: Hello,
    options: PeerOptions,
    weights: PeerWeights,
    asker: Asker,
    before: LoadedStage | None = None,
) -> LoadedPlan:
    """Check a plan against this member's offer, load its stage, and return it as a `LoadedPlan`.

    ``weights`` finds the model and fetches its missing parts for ``asker``. ``before`` is the stage of
    the last plan, for its weights. Raises `Incompatible`, `ModelError`, or `StepError` for stages that
    make no whole model.
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
    require_kv(plan.kv_dtype, {me: kernel})
    found = weights.find(asker)
    source = found.source
    check_plan(plan, source.spec.num_layers, source.spec.max_context)
    weights.make_ready(asker, found, plan.stages[position])
    chosen = stage_options(plan, position, options.member, source)
    progress = partial(asker.tell, "")
    ranks = ranks_of(plan, digest, position, me, source.spec, options=options.member)
    stage: LoadedStage
    if ranks is None:
        stage = load_member_stage(source, plan.stages[position], chosen, progress, before=before)
    else:
        stage = ranks.load(source, plan.stages[position], chosen, progress, before=before)
    room = stage.room_bytes(hello.memory_bytes)
    return LoadedPlan(plan, digest, stage, position, max(0, room), ranks=ranks)


def ranks_of(
    plan: Plan, digest: bytes, position: int, me: str, spec: ModelSpec, *, options: MemberOptions
) -> RankPeers | None:
    """Return the ranks that hold a stage together with this member; None if it holds the stage alone."""
    if plan.stages[position].world_size == 1:
        return None
    num_kv_heads = spec.cache_groups[0].num_kv_heads
    return RankPeers(plan, digest, position, me, num_kv_heads, join_s=options.ranks_join_s)


def stage_options(plan: Plan, position: int, member: MemberOptions, source: ModelSource) -> StageOptions:
    """Return the options of the stage at ``position`` on this member.

    Raises `UsageError` as `choose_devices` does.
    """
    kernel, wished = plan.kernel_of(position), stage_device(member.device, member.kernel)
    device = or_host(wished, kernel)
    if device != wished:
        why = why_not_on_mlx(source) or f"the cluster computes under {kernel}"
        _log.warning("this member computes on %s: %s", device, why)
    return StageOptions(
        kernel=kernel,
        block_size=plan.block_size,
        device=device,
        num_threads=member.num_threads,
        kv_dtype=plan.kv_dtype,
    )


def check_plan(plan: Plan, num_layers: int, max_context: int) -> None:
    """Check that the stages cover each layer once and in order.

    The first stage must embed, and one stage must own the output. Raises `StepError`.
    """
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
    """Check that no member has two places, and that rank 0 of each stage is its member.

    Raises `StepError`.
    """
    for stage in plan.stages:
        if stage.ranks and (stage.world_size < 2 or stage.ranks[0] != stage.member):
            raise StepError(
                f"the stage of {stage.member} has {len(stage.ranks)} ranks from {stage.ranks[0]} on, "
                f"expected {stage.member} and others"
            )
    holders = [name for stage in plan.stages for name in stage.holders]
    if len(set(holders)) != len(holders):
        raise StepError("a member has two stages of the plan, or two ranks")


def could_not_leave(head: Link, plan_id: int, step: int, error: ConvoyError) -> None:
    """Tell the head that a step of a device failed or could not be sent.

    Runs on the thread that waits for devices.
    """
    _log.warning("step %d could not leave: %s", step, error.message)
    # If this send fails, the head's link ends too, and the head learns of it there.
    with contextlib.suppress(ConvoyError):
        head.send(StepFailed(step, error.message[:MAX_REASON]), plan_id=plan_id, step=step)
