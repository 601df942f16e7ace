"""Share a run of layers out as a policy's rules allow, or name the rule that leaves no way to do it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from convoy.errors import PlanError, SpanError
from convoy.plan.memory.memory import fits, relieve
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.arrange import OutputOwner, Owners, Rest, arrangements, owners_of, wanted_runs
from convoy.plan.placement.rules import Breach, breaches, mend_text, room, satisfies
from convoy.plan.span import Span, layers_text
from convoy.plan.spec.model import ModelSpec
from convoy.trust.evidence.policy import PlacementRule


def share(
    spec: ModelSpec,
    members: Sequence[MemberOffer],
    rest: Rest,
    rules: Sequence[PlacementRule],
) -> Owners:
    """Return a part of ``rest`` for each of ``members``, in the given order if the rules allow it.

    The first way that fits in memory wins. If none fits, return the first of all, which `check_memory` then
    refuses. Raises PlanError if no way keeps the rules.
    """
    by_name = {member.name: member for member in members}

    def kept(owners: Sequence[tuple[str, Span]]) -> bool:
        return not breaches(spec, rules, [(by_name[name], span) for name, span in owners])

    first: Owners | None = None
    for arranged in arrangements(spec, members, rest, rules):
        if not kept(arranged):
            continue
        owners = relieve(spec, arranged, by_name, kept)
        if fits(spec, owners, by_name):
            return owners
        first = first or owners
    if first is not None:
        return first
    raise _no_way(spec, members, rest, rules)


def check_rules(
    spec: ModelSpec,
    members: Sequence[MemberOffer],
    owners: Owners,
    rules: Sequence[PlacementRule],
    given: Collection[str],
) -> None:
    """Raise SpanError for stages that break a rule and were ``given`` as spans, PlanError for others."""
    by_name = {member.name: member for member in members}
    placed = [(by_name[name], span) for name, span in owners]
    found = breaches(spec, rules, placed)
    if found:
        kind = SpanError if any(breach.member.name in given for breach in found) else PlanError
        told = [*map(str, found), *_shortages(spec, found, placed)]
        raise kind("; ".join(told), hint=mend_text(found[0], members))


def _no_way(
    spec: ModelSpec, members: Sequence[MemberOffer], rest: Rest, rules: Sequence[PlacementRule]
) -> PlanError:
    """Return the error for rules that leave no way, with the first reason that applies."""
    for reason in (_head_refused, _homeless, _unowned):
        error = reason(spec, members, rest, rules)
        if error is not None:
            return error
    owners = owners_of(members, wanted_runs(spec, members, rest), rest.output)
    spans = [span for _, span in owners]
    found = breaches(spec, rules, list(zip(members, spans, strict=True)))
    why = "; ".join(map(str, found))
    layers = layers_text(*rest.run)
    return PlanError(
        f"the rules leave no way to give each of {len(members)} members some of {layers}: {why}",
        hint="leave a member out of the roster, or change the rules",
    )


def _head_refused(
    spec: ModelSpec, members: Sequence[MemberOffer], rest: Rest, rules: Sequence[PlacementRule]
) -> PlanError | None:
    """Return the error if a rule refuses the head its end of the layers, or the output."""
    head = next((member for member in members if member.head), None)
    if head is None:
        return None
    run, owned = rest.run, rest.output is OutputOwner.HEAD
    least = Span(run[0], run[0] + 1, owned) if run[0] == 0 else Span(run[1] - 1, run[1], owned)
    found = breaches(spec, rules, [(head, least)])
    if not found:
        return None
    other = not breaches(spec, rules, [(head, Span(spec.num_layers - 1, spec.num_layers, True))])
    hint = mend_text(found[0], members)
    if owned and run[0] == 0 and other and spec.num_layers > 1:
        hint = f"in the reverse layout {head.name} owns the last layers: {head.name}=K:output, or {hint}"
    return PlanError(_told(found, f"{head.name} is the head"), hint=hint)


def _homeless(
    spec: ModelSpec, members: Sequence[MemberOffer], rest: Rest, rules: Sequence[PlacementRule]
) -> PlanError | None:
    """Return the error for a member without any allowed layer in the run."""
    for member in members:
        start, end = room(spec.num_layers, rules, member)
        if max(start, rest.start) >= min(end, rest.end):
            found = breaches(spec, rules, [(member, Span(*rest.run))])
            told = _told(found, f"no layer of {layers_text(*rest.run)} is left for it")
            return PlanError(told, hint=mend_text(found[0], members))
    return None


def _unowned(
    spec: ModelSpec, members: Sequence[MemberOffer], rest: Rest, rules: Sequence[PlacementRule]
) -> PlanError | None:
    """Return the error for the first or last layer of the run, if no free member may hold it."""
    for layer, given in ((rest.start, members[0]), (rest.end - 1, members[-1])):
        free = [given] if given.head else [member for member in members if not member.head]
        owned = rest.output is OutputOwner.LAST and layer == rest.end - 1
        refused = [breaches(spec, rules, [(member, Span(layer, layer + 1, owned))]) for member in free]
        if free and all(refused):
            found = [breach for each in refused for breach in each]
            runs = wanted_runs(spec, members, rest)
            wanted = zip(members, (span for _, span in owners_of(members, runs, rest.output)), strict=True)
            told = [*map(str, found), *_shortages(spec, found, list(wanted))]
            return PlanError("; ".join(told), hint=_elsewhere(found[0], members))
    return None


def _shortages(
    spec: ModelSpec, found: Sequence[Breach], owners: Sequence[tuple[MemberOffer, Span]]
) -> list[str]:
    """Return, for each broken rule that only the head satisfies, how many of its layers the head has."""
    told = []
    for number, rule in dict.fromkeys((breach.number, breach.rule) for breach in found):
        able = [(member, span) for member, span in owners if satisfies(rule, member)]
        if len(able) != 1 or not able[0][0].head:
            continue
        ((head, span),) = able
        for count, kept, which in (
            (rule.first_layers, min(span.end, rule.first_layers) - span.start, "first"),
            (rule.last_layers, span.end - max(span.start, spec.num_layers - rule.last_layers), "last"),
        ):
            if max(0, kept) < count:
                told.append(
                    f"{head.name}, the head, has {max(0, kept)} of the {which} {count} layers that "
                    f"rule {number} keeps"
                )
    return told


def _elsewhere(breach: Breach, members: Sequence[MemberOffer]) -> str:
    """Return `mend_text`, or the hint for a part that the allowed members cannot reach."""
    head = next((member for member in members if member.head), None)
    hint = mend_text(breach, members)
    if head is not None and hint.startswith(f"{head.name} would"):
        return f"{head.name}, the head, holds the other end: let one more member satisfy rule {breach.number}"
    return hint


def _told(found: Sequence[Breach], why: str) -> str:
    return "; ".join(map(str, found)) + f" ({why})"
