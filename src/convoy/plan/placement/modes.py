"""The placements that members could have, by mode, and the choice among them.

An impossible mode is kept with its reason. A request for it gets the reason as an error, and a plan report
shows it beside the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from convoy.config.kernels import MLX_KERNELS, STEADY
from convoy.errors import ConvoyError, PlanError, SpanError
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.grouping import best_world_size, in_groups, is_grouped
from convoy.plan.placement.parallel import (
    Asked,
    Mode,
    ParallelChoice,
    ParallelFacts,
    PredictedSteps,
    choose_parallel,
    why_not_tensor,
)
from convoy.plan.placement.placement import Placement, place
from convoy.plan.spec.model import ModelSpec
from convoy.trust.evidence.policy import PlacementRule

# Seconds of one sequence's decode step; None if not measured.
Predict = Callable[[Placement], float | None]
_WHOLE = "the spans give members whole layers; joined names, alpha+beta=0:9, share them"


@dataclass(frozen=True)
class ModePlacements:
    """Hold the placement of each mode, or in ``refused`` the reason against it.

    ``facts`` lack the measurements.
    """

    spec: ModelSpec
    placements: dict[Mode, Placement]
    refused: dict[Mode, ConvoyError]
    facts: ParallelFacts
    # Set by a person's spans, so no other mode is meant.
    is_grouped: bool

    @property
    def why(self) -> str | None:
        """Return why no ranks share layers, if that was tried in vain."""
        refused = self.refused.get("tensor")
        return None if refused is None else refused.message

    def attempt(self, mode: Mode, make: Callable[[], Placement]) -> None:
        """Store the placement that ``make`` returns, or its refusal."""
        try:
            self.placements[mode] = make()
        except (PlanError, SpanError) as error:
            self.refused[mode] = error

    def of(self, mode: Mode) -> Placement:
        """Return the placement of a mode, or raise the reason against it."""
        if mode in self.placements:
            return self.placements[mode]
        raise self.refused[mode]


def find_placements(
    spec: ModelSpec,
    members: Sequence[MemberOffer],
    spans: Mapping[str, str] | None = None,
    rules: Sequence[PlacementRule] = (),
    *,
    ranks: int | None = None,
    fewer: bool = False,
) -> ModePlacements:
    """Return the result of `place` for these members in each mode.

    ``ranks`` is the number of each stage, or with ``fewer`` the most; None takes as many as possible.
    """
    modes = ModePlacements(spec, {}, {}, ParallelFacts(len(members), 1, _kernel(members)), is_grouped(spans))
    alone = [member for member in members if member.head]
    modes.attempt("single", lambda: place(spec, alone, spans if len(members) == 1 else None, rules))
    if modes.is_grouped:
        modes.attempt("tensor", lambda: place(spec, members, spans, rules))
        modes.refused["pipeline"] = SpanError(
            "spans are for several ranks each", hint="use --parallel tensor or auto"
        )
        return dataclasses.replace(
            modes, facts=dataclasses.replace(modes.facts, world_size=2, room=modes.why)
        )
    if len(members) == 1:
        # The other modes would be the same placement, or have no group of ranks.
        return modes
    modes.attempt("pipeline", lambda: place(spec, members, spans, rules))
    try:
        world_size = best_world_size(spec, len(members), ranks, fewer=fewer)
    except PlanError as error:
        return dataclasses.replace(modes, facts=dataclasses.replace(modes.facts, model=error.message))
    if not spans:
        modes.attempt("tensor", lambda: place(spec, in_groups(members, world_size), None, rules))
    facts = dataclasses.replace(modes.facts, world_size=world_size, room=_WHOLE if spans else modes.why)
    return dataclasses.replace(modes, facts=facts)


def _kernel(members: Sequence[MemberOffer]) -> str:
    """Return the kernel with the strictest promise, which binds the plan."""
    return next((member.kernel for member in members if member.kernel in STEADY), members[0].kernel)


def choose_placement(
    asked: Asked, modes: ModePlacements, *, predict: Predict | None = None, collective: str | None = None
) -> Placement:
    """Return the chosen placement with the reason. ``predict`` is called only if the prediction decides.

    ``collective`` is the reason why it did not come up, if it was tried. Raises PlanError or SpanError if the
    requested or chosen mode is impossible.
    """
    if modes.is_grouped and modes.facts.num_members > 1:
        if asked in ("single", "pipeline"):
            raise SpanError(
                f"{asked} was asked for, and a span is for several ranks",
                hint="leave --parallel out, or give each member a span of its own",
            )
        if asked == "auto":
            choose_parallel("tensor", dataclasses.replace(modes.facts, collective=collective))
            return _given(modes, ParallelChoice("tensor", "asked for: a span is for several ranks"))
    facts = dataclasses.replace(modes.facts, collective=collective)
    if asked == "auto" and predict is not None and _depends(modes, facts):
        pipeline_s, tensor_s = predict(modes.of("pipeline")), predict(modes.of("tensor"))
        if pipeline_s is not None and tensor_s is not None:
            facts = dataclasses.replace(facts, steps=PredictedSteps(pipeline_s, tensor_s))
    try:
        return _given(modes, choose_parallel(asked, facts))
    except (PlanError, SpanError) as error:
        if asked == "single" and "pipeline" in modes.placements:
            # The advice to add members does not fit, because they are there.
            raise type(error)(
                f"single was asked for, and cannot be: {error.message}",
                hint="with --parallel auto or pipeline these members hold the model together",
            ) from None
        raise


def _given(modes: ModePlacements, choice: ParallelChoice) -> Placement:
    return dataclasses.replace(modes.of(choice.mode), reason=choice.reason)


def _depends(modes: ModePlacements, facts: ParallelFacts) -> bool:
    """Return whether the prediction decides."""
    possible = facts.num_members > 1 and why_not_tensor(facts) is None
    possible = possible and facts.kernel not in {*STEADY, *MLX_KERNELS}
    return possible and {"pipeline", "tensor"} <= modes.placements.keys()
