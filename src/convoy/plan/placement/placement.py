"""The assignment of layers to members: as a person's spans say, or automatic, under a policy; or the refusal.

The head owns the first layers and the output (`0:K,output`, the default), the last layers and the output
(`K:output`, reverse), everything, or only the first layers (`0:K`, forward): then the member with the last
layers owns the output. Peers share the rest in any way. Only spans give the output to a peer, which then
samples the tokens and reads them. A policy's placement rules bind spans and shares alike; `placement.rules`
defines their words.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.config.kernels import form_of
from convoy.errors import PlanError, SpanError
from convoy.plan.memory.memory import check_memory
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.arrange import OutputOwner, Rest
from convoy.plan.placement.grouping import gather_named
from convoy.plan.placement.parallel import Mode
from convoy.plan.placement.route import Route, missing_layers
from convoy.plan.placement.sharing import check_rules, share
from convoy.plan.span import Span, format_span, layers_text, parse_span
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import check_sharding, rank_bytes
from convoy.trust.evidence.policy import PlacementRule
from convoy.wire.messages.control import StageAssignment

__all__ = ["MemberOffer", "Placement", "place"]


@dataclass(frozen=True)
class Placement:
    """Hold a plan that fits: stages in the order of their layers."""

    spec: ModelSpec
    stages: tuple[StageAssignment, ...]
    head: str
    # Of members.
    kernels: Mapping[str, str]
    # Of members: the form of their weights and K/V, a word of `config.kernels.FORMS`.
    forms: Mapping[str, str]
    memory_bytes: Mapping[str, int]
    members: tuple[MemberOffer, ...] = ()
    # All of them hold.
    rules: tuple[PlacementRule, ...] = ()
    # Why its members share the model in this mode, if that was chosen.
    reason: str = ""

    @property
    def hidden_dtype(self) -> str:
        """Return the dtype in which hidden states cross links: that of the narrowest stage."""
        used = {form_of(self.kernels[stage.member]).dtype for stage in self.stages}
        return "bfloat16" if "bfloat16" in used else "float32"

    def stage_form(self, stage: StageAssignment) -> str:
        """Return the form of the largest slice of a stage: that of a rank that unpacks, if there is one."""
        forms = [self.forms[name] for name in stage.holders]
        return next((form for form in forms if not form_of(form).keeps), forms[0])

    def unpacks(self, stage: StageAssignment, name: str) -> bool:
        """Return whether a holder of a stage takes more than in the form of the file.

        It has no compiled code, and unpacks matrices of these layers.
        """
        if self.forms[name] == self.kernels[name]:
            return False
        span = Span(stage.start, stage.end, stage.output)
        held, kept = (
            rank_bytes(self.spec, span, form, stage.world_size)
            for form in (self.forms[name], self.kernels[name])
        )
        return held > kept

    @property
    def mode(self) -> Mode:
        """Return how its members share the model."""
        if any(stage.world_size > 1 for stage in self.stages):
            return "tensor"
        return "pipeline" if len(self.stages) > 1 else "single"

    @property
    def holders(self) -> tuple[str, ...]:
        """Return all members with a stage or a slice of one, in the order of the route and of ranks."""
        return tuple(name for stage in self.stages for name in stage.holders)

    @property
    def route(self) -> Route:
        """Return the way of a token through the stages."""
        return Route(self.spec, self.stages, self.head)


def place(
    spec: ModelSpec,
    members: Sequence[MemberOffer],
    spans: Mapping[str, str] | None = None,
    rules: Sequence[PlacementRule] = (),
) -> Placement:
    """Give every member a stage.

    ``spans`` maps member names to span texts, or ``alpha+beta`` to the span of a stage that both hold as
    ranks; an offer may also be that of ranks already. Members without a span share the layers left over as
    ``rules`` allow: between equal members so that stages take the same time, else by memory.

    Raises SpanError for spans that are wrong, alone or together, or break a rule. Raises PlanError for too
    many members or too little memory, or if no way to share the layers keeps the rules.
    """
    members, spans = gather_named(members, spans or {})
    for member in members:
        if member.world_size > 1:
            check_sharding(spec, member.world_size)
    head, offers = _find_head(members), {member.name: member for member in members}
    given = _parse(spec, offers, spans)
    rest = _share_rest(spec, members, given, rules)
    owners = sorted([*given.items(), *rest], key=lambda owner: (owner[1], owner[0]))
    _check_layers(spec, owners)
    _check_output(spec, owners, head)
    _check_cuts(spec, owners)
    named = {one.name for name in given for one in offers[name].each}
    check_rules(spec, members, owners, rules, named)
    check_memory(spec, owners, offers)
    each = [one for member in members for one in member.each]
    return Placement(
        spec=spec,
        stages=tuple(_stage(offers[name], span) for name, span in owners),
        head=head,
        kernels={member.name: member.kernel for member in each},
        forms={member.name: member.form for member in each},
        memory_bytes={member.name: member.memory_bytes for member in each},
        members=tuple(each),
        rules=tuple(rules),
    )


def _stage(offer: MemberOffer, span: Span) -> StageAssignment:
    ranks = [member.name for member in offer.ranks]
    return StageAssignment(offer.name, span.start, span.end, span.embed, span.output, ranks)


def _find_head(members: Sequence[MemberOffer]) -> str:
    names = [one.name for member in members for one in member.each]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlanError(f"member {twice} is listed twice")
    heads = [member.name for member in members if member.head]
    if len(heads) != 1:
        raise PlanError(f"{len(heads)} of {len(members)} members are the head, expected exactly one")
    for member in members:
        if member.memory_bytes <= 0:
            raise PlanError(
                f"{member.name} offers {member.memory_bytes} bytes of memory, expected more than 0",
                hint="set memory_gb under [model] of that member",
            )
    return heads[0]


def _parse(spec: ModelSpec, members: Mapping[str, MemberOffer], spans: Mapping[str, str]) -> dict[str, Span]:
    given = {}
    for name, text in spans.items():
        if name not in members:
            raise SpanError(
                f"span {text!r} is for {name}, expected a member: {', '.join(members)}",
                hint="name the members as the roster does",
            )
        try:
            given[name] = parse_span(text, spec.num_layers)
        except SpanError as error:
            raise SpanError(f"{name}: {error.message}", hint=error.hint) from None
    return given


def _share_rest(
    spec: ModelSpec,
    members: Sequence[MemberOffer],
    given: Mapping[str, Span],
    rules: Sequence[PlacementRule],
) -> list[tuple[str, Span]]:
    without = [member for member in members if member.name not in given]
    if not without:
        return []
    (start, end) = _left_over(spec, [member.name for member in without], given)
    # The head comes first, for the default layout. If the first layers are taken, it comes last, for the
    # reverse layout.
    without.sort(key=lambda member: member.head is not (start == 0))
    rest = Rest(start, end, _output_owner(spec, members, given, end))
    return share(spec, without, rest, rules)


def _output_owner(
    spec: ModelSpec, members: Sequence[MemberOffer], given: Mapping[str, Span], end: int
) -> OutputOwner:
    """Return the head, unless a span names another member, or the layout is the head's `0:K`.

    In that layout the last layers must be left to share.
    """
    if any(span.output for span in given.values()):
        return OutputOwner.ELSEWHERE
    mine = next((given.get(member.name) for member in members if member.head), None)
    forward = mine is not None and mine.embed and end == spec.num_layers
    return OutputOwner.LAST if forward else OutputOwner.HEAD


def _left_over(spec: ModelSpec, names: Sequence[str], given: Mapping[str, Span]) -> tuple[int, int]:
    """Return the one run of layers that no span claims.

    Raises SpanError if there is none, or more than one.
    """
    listed = ", ".join(names)
    gaps = missing_layers(spec.num_layers, [(span.start, span.end) for span in given.values()])
    if not gaps:
        raise SpanError(
            f"no layer is left for {listed}, expected at least one for each member",
            hint=f"take layers out of a span, or leave {listed} out",
        )
    if len(gaps) > 1:
        runs = " and ".join(layers_text(start, end) for start, end in gaps)
        raise SpanError(
            f"{runs} are left over for {listed}, expected one run", hint="give every member a span"
        )
    return gaps[0]


def _check_layers(spec: ModelSpec, owners: Sequence[tuple[str, Span]]) -> None:
    widest_name, widest = owners[0]
    for name, span in owners[1:]:
        if span.start < widest.end:
            layers = layers_text(span.start, min(span.end, widest.end))
            here, there = format_span(widest, spec.num_layers), format_span(span, spec.num_layers)
            raise SpanError(
                f"{layers} claimed twice, by {widest_name} ({here}) and by {name} ({there})",
                hint="let one span end before the next begins",
            )
        if span.end > widest.end:
            widest_name, widest = name, span
    missing = missing_layers(spec.num_layers, [(span.start, span.end) for _, span in owners])
    if missing:
        runs = " and ".join(layers_text(start, end) for start, end in missing)
        raise SpanError(
            f"no member owns {runs} of {spec.num_layers}, expected every layer to have an owner",
            hint=f"lengthen a span, for example {_over(spec, owners, missing[0])}",
        )


def _over(spec: ModelSpec, owners: Sequence[tuple[str, Span]], gap: tuple[int, int]) -> str:
    """Return the span of the neighbour before a gap, or else behind it, extended over these layers."""
    for name, span in owners:
        if span.end == gap[0] or gap[0] == 0:
            longer = Span(min(span.start, gap[0]), max(span.end, gap[1]), span.output)
            return f"{name}={format_span(longer, spec.num_layers)}"
    raise AssertionError(f"no member is beside layers {gap}")


def _check_output(spec: ModelSpec, owners: Sequence[tuple[str, Span]], head: str) -> None:
    mine, (last, widest) = dict(owners)[head], owners[-1]
    if mine.start > 0 and last != head:
        raise SpanError(
            f"the head, {head}, owns {layers_text(mine.start, mine.end)} in the middle, "
            f"expected the first layers (0:K or 0:K,output) or the last (K:output)",
            hint="give the head 0:K,output or K:output",
        )
    claimed = {name: f"{name} ({format_span(span, spec.num_layers)})" for name, span in owners}
    claiming = [name for name, span in owners if span.output]
    hint = f"use {mine.start}:{'' if last == head else f'{mine.end - 1},'}output for {head}"
    expected = f"expected the head, {claimed[head]}, to own it"
    if last != head:
        expected += f", or the member with the last layers, {claimed[last]}"
        hint += f", or {widest.start}:output for {last} and no output for {head}"
    if not claiming:
        raise SpanError(f"no member owns the output, {expected}", hint=hint)
    if len(claiming) > 1:
        raise SpanError(
            f"the output claimed twice, by {' and by '.join(claimed[name] for name in claiming)}",
            hint="leave ,output out of all spans but one",
        )
    if claiming[0] not in (head, last):
        raise SpanError(f"the output claimed by {claimed[claiming[0]]}, {expected}", hint=hint)


def _check_cuts(spec: ModelSpec, owners: Sequence[tuple[str, Span]]) -> None:
    for (before, _), (after, span) in itertools.pairwise(owners):
        reason = spec.forbidden_cuts.get(span.start)
        if reason is not None:
            raise SpanError(
                f"the cut between {before} and {after}, before layer {span.start}, is not allowed: {reason}",
                hint="move the cut to another layer, or leave the spans out: then the plan finds one",
            )
