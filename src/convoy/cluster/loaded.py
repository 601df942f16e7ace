"""A plan as one peer holds it: checked, loaded, and once active, a place in the ring with two neighbours."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import partial

from convoy.cluster.options import MemberOptions, PeerOptions
from convoy.cluster.weights import Asker, Weights
from convoy.engine.hand_over import Failed
from convoy.engine.keeper import MAX_REASON, BlockKeeper
from convoy.engine.peer import StageLoop, StageRoute
from convoy.errors import ConvoyError, Incompatible, StepError
from convoy.model.device import choose_devices
from convoy.model.stage import Stage, StageOptions
from convoy.transport.link import Link
from convoy.wire.messages import Activate, Hello, Plan, StageAssignment, StepFailed

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
    loop: StageLoop | None = None
    keeper: BlockKeeper | None = None
    successor: Link | None = None
    predecessor: Link | None = None

    @property
    def assignment(self) -> StageAssignment:
        return self.plan.stages[self.position]

    @property
    def successor_name(self) -> str:
        return self.plan.stages[(self.position + 1) % len(self.plan.stages)].member

    @property
    def predecessor_name(self) -> str | None:
        """None for the stage that owns the embedding: it starts each step."""
        return self.plan.stages[self.position - 1].member if self.position else None

    def activate(
        self,
        activate: Activate,
        head: str,
        successor: Link,
        failed: Failed = lambda _step, _error: None,
    ) -> StageLoop:
        """Make the pools and take the place in the ring. Raises `StepError` for what was not offered.

        ``failed``: see `StageLoop`.
        """
        stages = self.plan.stages
        self._check_head(head)
        # a count below 1 is refused with the pools, and makes no room for others
        pairs = zip(activate.num_blocks, self.stage.block_bytes, strict=False)
        asked = sum(max(0, count) * size for count, size in pairs)
        if asked > self.room_bytes:
            raise StepError(f"the head asks for {asked} bytes of K/V, and {self.room_bytes} were offered")
        self.stage.make_pools(activate.num_blocks)
        route = StageRoute(
            generation=self.plan.generation,
            assignment=self.assignment,
            predecessor=self.predecessor_name,
            last=stages[0].member == head and self.position == len(stages) - 1,
            activation_dtype=self.plan.activation_dtype,
            overlaps=self.stage.overlaps,
        )
        self.successor = successor
        self.loop = StageLoop(self.stage, route, successor, failed)
        return self.loop

    def _check_head(self, head: str) -> None:
        """The ring begins or ends with the head; who owns the output follows from that."""
        first, last = self.plan.stages[0], self.plan.stages[-1]
        if head not in (first.member, last.member):
            raise StepError(f"{head} leads this plan, expected it to have the first stage or the last")
        owner = first if first.output else last
        if owner.member != head and owner is not last:
            raise StepError(f"the plan has the output on {owner.member}, expected {head} or the last stage")

    def is_neighbour(self, link: Link) -> bool:
        """Whether the ring needs this very link."""
        return link is self.successor or link is self.predecessor

    def neighbours(self) -> list[Link]:
        return [link for link in (self.successor, self.predecessor) if link is not None]


def load_plan(
    plan: Plan,
    digest: bytes,
    *,
    me: str,
    hello: Hello,
    options: PeerOptions,
    weights: Weights,
    asker: Asker,
    before: Stage | None = None,
) -> LoadedPlan:
    """Check a plan against this member's offer, and load its stage; ``before`` is what the last plan left.

    ``weights`` finds the model, and gets for ``asker`` what is missing of it here. Raises `Incompatible`,
    `ModelError`, or `StepError` for stages that make no whole model.
    """
    position = next((i for i, stage in enumerate(plan.stages) if stage.member == me), None)
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
    stage = Stage.load(source, plan.stages[position], chosen, progress, before=before)
    room = stage.room_bytes(hello.memory_bytes)
    return LoadedPlan(plan, digest, stage, position, max(0, room))


def stage_options(plan: Plan, position: int, member: MemberOptions) -> StageOptions:
    """How the stage at ``position`` computes on this member. Raises `UsageError` as `choose_devices` does."""
    return StageOptions(
        kernel=plan.kernel_of(position),
        block_size=plan.block_size,
        device=",".join(choose_devices(member.device, member.kernel)),
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
    if len({stage.member for stage in plan.stages}) != len(plan.stages):
        raise StepError("a member has two stages of the plan")
    owners = sum(stage.output for stage in plan.stages)
    if [stage.embed for stage in plan.stages] != [True, *[False] * (len(plan.stages) - 1)] or owners != 1:
        raise StepError(f"the plan's first stage must embed and one own the output, and {owners} do")
    if not (plan.stages[0].output or plan.stages[-1].output):
        raise StepError("a stage in the middle of the plan owns the output, expected the first or the last")
    if not 1 <= plan.max_context <= max_context:
        raise StepError(f"the plan's context of {plan.max_context} tokens is not in [1, {max_context}]")


def could_not_leave(head: Link, generation: int, step: int, error: ConvoyError) -> None:
    """A step that a device ran, or could not: on the thread that waits for devices."""
    _log.warning("step %d could not leave: %s", step, error.message)
    with contextlib.suppress(ConvoyError):  # then the head's link ends too, and says so itself
        head.send(StepFailed(step, error.message[:MAX_REASON]), generation=generation, step=step)
