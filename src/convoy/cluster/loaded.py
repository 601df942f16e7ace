"""A plan as one peer holds it: checked, loaded, and once active, a place in the ring with two neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from convoy.cluster.options import PeerOptions
from convoy.engine.peer import StageLoop, StageRoute
from convoy.errors import Incompatible, ModelError, StepError
from convoy.model.source import BUNDLED, ModelSource
from convoy.model.stage import Stage, StageOptions
from convoy.transport.link import Link
from convoy.wire.messages import Activate, Hello, Plan, StageAssignment


@dataclass(slots=True)
class LoadedPlan:
    """``loop``, ``successor`` and ``predecessor`` are None until the plan is active.

    The predecessor's link is known with its first hidden state; a predecessor that is the head uses the
    head's link.
    """

    plan: Plan
    digest: bytes
    stage: Stage
    position: int
    max_blocks: int
    loop: StageLoop | None = None
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

    def activate(self, activate: Activate, head: str, successor: Link) -> StageLoop:
        """Make the pools and take the place in the ring. Raises `StepError` for what was not offered."""
        if activate.num_blocks > self.max_blocks:
            raise StepError(
                f"the head asks for {activate.num_blocks} K/V blocks, and {self.max_blocks} were offered"
            )
        self.stage.make_pools(activate.num_blocks)
        stages = self.plan.stages
        route = StageRoute(
            generation=self.plan.generation,
            assignment=self.assignment,
            predecessor=self.predecessor_name,
            last=stages[0].member == head and self.position == len(stages) - 1,
            activation_dtype=self.plan.activation_dtype,
        )
        self.successor = successor
        self.loop = StageLoop(self.stage, route, successor)
        return self.loop

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
    progress: Callable[[int, int], None],
) -> LoadedPlan:
    """Check a plan against this member's offer, and load its stage. Raises `Incompatible` or `ModelError`."""
    if plan.kernel not in hello.kernels or plan.activation_dtype not in hello.dtypes:
        raise Incompatible(
            f"the plan asks for {plan.kernel} and {plan.activation_dtype}, but {me} has "
            f"{', '.join(hello.kernels)} and {', '.join(hello.dtypes)}"
        )
    position = next((i for i, stage in enumerate(plan.stages) if stage.member == me), None)
    if position is None:
        raise Incompatible(f"the plan has no stage for {me}")
    source = _find_source(plan.model, me, options)
    if source.digest != plan.model_digest:
        raise Incompatible(
            f"{plan.model} differs: the head's digest is {plan.model_digest[:12]}, "
            f"{me}'s is {source.digest[:12]}",
            hint="copy the same model directory to both members",
        )
    stage_options = StageOptions(
        kernel=plan.kernel, block_size=plan.block_size, num_threads=options.member.num_threads
    )
    stage = Stage.load(source, plan.stages[position], stage_options, progress)
    room = hello.memory_bytes - stage.weight_bytes
    return LoadedPlan(plan, digest, stage, position, max(0, room // stage.block_bytes))


def _find_source(model: str, me: str, options: PeerOptions) -> ModelSource:
    if options.model_path is not None:
        return ModelSource.resolve(str(options.model_path))
    if model in BUNDLED:
        return ModelSource.resolve(model)
    raise ModelError(
        f"{me} has no files for {model}",
        hint="give its directory: `convoy join --model PATH`, or path in the [model] section",
    )
