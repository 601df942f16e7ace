"""A policy's placement rules: the parts of a model that stay on certain members.

A member can recover all of a prompt from the activations of its layers, more slowly the deeper they are. So a
rule can keep the embedding, the output and the layers at both ends on members of a level, or on named ones
(docs/threat-model.md has the sources). A rule binds the head like every other member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.plan.offer import MemberOffer
from convoy.plan.span import Span, layers_text
from convoy.plan.spec.model import ModelSpec
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import PlacementRule


@dataclass(frozen=True)
class Breach:
    """Describe a broken rule, a member that does not satisfy it, and the kept parts that it would hold.

    ``number`` counts from 1, in the policy's order.
    """

    number: int
    rule: PlacementRule
    member: MemberOffer
    # Such as "the embedding and layers 0-1".
    parts: str

    def __str__(self) -> str:
        where = f"rule {self.number}: {self.parts} must be on {place_text(self.rule)}"
        if self.rule.level is None:
            return f"{where}, not on {self.member.name}"
        return f"{where}, and {self.member.name} has {self.member.level.text}"


def satisfies(rule: PlacementRule, member: MemberOffer) -> bool:
    """Return whether ``member`` may hold the rule's parts; of several ranks, whether each may.

    A level below `hardware` never satisfies a rule.
    """
    if rule.level is None:
        return all(one.name in rule.members for one in member.each)
    least = max(rule.level, Level.HARDWARE)
    return all(one.level >= least for one in member.each)


def breaches(
    spec: ModelSpec,
    rules: Sequence[PlacementRule],
    owners: Sequence[tuple[MemberOffer, Span]],
    first_number: int = 1,
) -> list[Breach]:
    """Return every rule that these stages break, by rule and then by layer; empty if the rules hold."""
    found = []
    for number, rule in enumerate(rules, start=first_number):
        for member, span in owners:
            parts = _kept_parts(spec, rule, span)
            if parts:
                out = [one for one in member.each if not satisfies(rule, one)]
                found += [Breach(number, rule, one, parts) for one in out]
    return found


def room(num_layers: int, rules: Sequence[PlacementRule], member: MemberOffer) -> tuple[int, int]:
    """Return the layers [start, end) that the rules leave for ``member``; nothing if start >= end."""
    against = [rule for rule in rules if not satisfies(rule, member)]
    start = max([max(rule.first_layers, int(rule.embedding)) for rule in against], default=0)
    last = max([rule.last_layers for rule in against], default=0)
    return min(start, num_layers), max(0, num_layers - last)


def place_text(rule: PlacementRule) -> str:
    """Return the members that a rule allows: ``members of level hardware``, or ``alpha, beta or gamma``."""
    if rule.level is not None:
        return f"members of level {rule.level.text}"
    return " or ".join(filter(None, [", ".join(rule.members[:-1]), rule.members[-1]]))


def keep_text(rule: PlacementRule, num_layers: int) -> str:
    """Return a rule's parts of a model with ``num_layers``: ``the embedding, layers 0-1 and the output``."""
    return _joined(
        embedding=rule.embedding,
        runs=_kept_runs(rule, num_layers, Span(0, num_layers)),
        output=rule.output,
    )


def mend_text(breach: Breach, members: Sequence[MemberOffer]) -> str:
    """Return the members that would satisfy the rule, or the missing level or name."""
    able = [member.name for member in members if satisfies(breach.rule, member)]
    if able:
        return f"{', '.join(able)} would satisfy rule {breach.number}: give {breach.parts} to one of them"
    if breach.rule.level is None:
        return f"no member is named {place_text(breach.rule)}: add it to the roster, or change the rule"
    return (
        f"no member has level {breach.rule.level.text}: enrol the TPM of one, name members in the rule, "
        f"or change the rule"
    )


def _kept_parts(spec: ModelSpec, rule: PlacementRule, span: Span) -> str:
    # A member that reads token ids reads the text, so layers that need them count as part of the embedding.
    ids = [layer for layer in sorted(spec.token_id_layers) if span.start <= layer < span.end]
    runs = _kept_runs(rule, spec.num_layers, span)
    if rule.embedding:
        covered = {layer for start, end in runs for layer in range(start, end)}
        runs = sorted([*runs, *((layer, layer + 1) for layer in ids if layer not in covered)])
    return _joined(embedding=rule.embedding and span.embed, runs=runs, output=rule.output and span.output)


def _kept_runs(rule: PlacementRule, num_layers: int, span: Span) -> list[tuple[int, int]]:
    """Return the layers of ``span`` that the rule keeps, as runs [start, end)."""
    first = min(rule.first_layers, num_layers)
    last = max(first, num_layers - rule.last_layers)
    runs = [(max(start, span.start), min(end, span.end)) for start, end in ((0, first), (last, num_layers))]
    runs = [(start, end) for start, end in runs if start < end]
    if len(runs) == 2 and runs[0][1] == runs[1][0]:
        return [(runs[0][0], runs[1][1])]
    return runs


def _joined(*, embedding: bool, runs: Sequence[tuple[int, int]], output: bool) -> str:
    parts = ["the embedding"] * embedding + [layers_text(*run) for run in runs] + ["the output"] * output
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
