"""Choose the plan for the connected members: the one that was asked for, or after a loss the next best.

The first of these that fits is taken:

1. the stages as they were, if all their members are connected;
2. the spans that the operator gave, if all members that they name are connected;
3. all members but standbys, and then without those of the least memory;
4. a standby in the place of each lost member, so that no other member loads anything;
5. members and standbys together.

A member that was given up for being slow counts as a standby. If the operator gave no spans,
`placement.modes` chooses for each of these whether members share layers as ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from convoy.cluster.attestation.member_verifier import MemberVerifier
from convoy.cluster.offer import (
    MIXED,
    agree_dtype,
    agree_kernels,
    can_take_part,
    holds_kv,
    other_bits,
    require_kv,
)
from convoy.cluster.options import HeadOptions
from convoy.config.kernels import EXACT_KERNELS, KERNELS, held_form
from convoy.errors import ConvoyError, PlanError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import RANKS
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.placement.grouping import names_in
from convoy.plan.placement.modes import Predict, choose_placement, find_placements
from convoy.plan.placement.placement import MemberOffer, Placement
from convoy.plan.report import report
from convoy.plan.span import JOINT, Span, format_span, split_key
from convoy.transport.membership import Membership
from convoy.wire.messages.control import Hello, Plan

_log = logging.getLogger(__name__)

_MAX_STANDBY_ORDERS = 24


@dataclass(frozen=True, slots=True)
class PlannedStages:
    """Hold a plan and the placement that it came from."""

    plan: Plan
    placement: Placement

    @property
    def members(self) -> set[str]:
        return {name for stage in self.plan.stages for name in stage.holders}


@dataclass(frozen=True, slots=True)
class _Variant:
    """Hold members and spans to try. ``reason`` says why the stages ran, if they are kept."""

    members: Sequence[str]
    spans: Mapping[str, str] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Hold a placement with what its plan needs.

    ``hellos`` and ``kernels`` are of all members to choose from. ``dtype`` is that of hidden states on links.
    """

    placement: Placement
    hellos: Mapping[str, Hello]
    kernels: Mapping[str, str]
    dtype: str


class PlanIds:
    """Number the plans of a head, whatever model they are of.

    A member refuses a plan whose number is not above the last one. So the numbers grow over restarts too, and
    frames of an earlier head are refused. They also grow when the clock goes back. Thread-safe.
    """

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return a number above all earlier ones."""
        with self._lock:
            self._last = max(time.time_ns(), self._last + 1)
            return self._last


class Planner:
    """Choose plans. It is pure but for the numbers of the plans."""

    def __init__(
        self,
        me: Membership,
        source: ModelSource,
        options: HeadOptions,
        verifier: MemberVerifier,
        manifest: Callable[[], str] = lambda: "",
        *,
        hub: str = "",
        predict: Predict | None = None,
        ids: PlanIds | None = None,
    ) -> None:
        """Prepare to plan.

        ``manifest`` returns the digest of the model's manifest, for plans that have peers. ``hub`` is the
        commit of a hub that peers may read weights from; empty for none. ``predict`` returns how long a
        step would take; without it, no choice depends on speed. ``ids`` numbers the plans, and is shared by
        all planners of a head; None begins anew.
        """
        self._predict = predict
        # Members that could not join as ranks, and the reason.
        self._failed: tuple[frozenset[str], str] | None = None
        self._manifest = manifest
        self._hub = hub
        self._me = me
        self._source = source
        # Raises ModelError for K/V that the model cannot hold as the options ask.
        self._spec = source.spec.with_kv_dtype(options.kv_dtype)
        self._options = options
        self._verifier = verifier
        self._ids = ids or PlanIds()
        # The kernels of the first plan, which fix the bits of all texts.
        self._kernels: frozenset[str] = frozenset()
        # Members that compute other bits than the head, and those bits.
        self._told: set[tuple[str, str]] = set()

    def first(self, hellos: Mapping[str, Hello]) -> PlannedStages:
        """Return the plan of a bring-up. Raises `PlanError`, `SpanError` or `Incompatible`."""
        proposal = self._plan(self._choose_first(hellos))
        self._kernels = frozenset(proposal.plan.kernels or [proposal.plan.kernel])
        return proposal

    def check_first(self, hellos: Mapping[str, Hello]) -> None:
        """Raise `PlanError` with the reason if `first` would find no plan. Nothing is noted or numbered."""
        try:
            self._aside(hellos)._choose_first(hellos)
        except ConvoyError as error:
            raise PlanError(error.message, hint=error.hint) from error

    def again(
        self, hellos: Mapping[str, Hello], before: Placement | None, slow: Collection[str] = ()
    ) -> PlannedStages:
        """Return the best plan after a loss.

        With ``before`` None nothing was lost, and a better plan is wanted. Raises `PlanError` with the
        reason why the connected members without standbys are not enough.
        """
        self._forget_failure(hellos)
        return self._plan(self._choose_again(hellos, before, slow))

    def foresee(
        self, hellos: Mapping[str, Hello], before: Placement | None, predict: Predict | None = None
    ) -> Placement:
        """Return the placement that `again` would choose. Nothing is noted, and no plan is numbered.

        ``predict`` takes the place of the planner's own. Why ranks failed is left out of an error: it may
        hold a peer's words.
        """
        other = self._aside(hellos)
        other._predict = predict or self._predict
        return other._choose_again(hellos, before).placement

    def _aside(self, hellos: Collection[str]) -> Planner:
        """Return a copy to try a choice on. Its errors leave out why ranks failed."""
        other = copy.copy(self)
        other._forget_failure(hellos)
        if other._failed is not None:
            other._failed = other._failed[0], "their ranks could not join"
        return other

    def tensor_failed(self, hellos: Collection[str], why: str) -> None:
        """Note that the ranks of these members could not join.

        They are not tried again until the members change.
        """
        self._failed = frozenset(hellos), why

    def has_failed(self, hellos: Collection[str]) -> bool:
        """Return whether ranks of these members could not join."""
        return self._failed is not None and self._failed[0] == frozenset(hellos)

    def _forget_failure(self, hellos: Collection[str]) -> None:
        if self._failed is not None and self._failed[0] != frozenset(hellos):
            self._failed = None

    def _choose_first(self, hellos: Mapping[str, Hello]) -> _Choice:
        self._forget_failure(hellos)
        # An earlier first plan may not have come to run.
        self._kernels = frozenset()
        members = [name for name in hellos if not hellos[name].standby]
        variant = _Variant(members, self._options.spans)
        return self._choose({name: hellos[name] for name in members}, variant, fewer=False)

    def _choose_again(
        self, hellos: Mapping[str, Hello], before: Placement | None, slow: Collection[str] = ()
    ) -> _Choice:
        refused: ConvoyError | None = None
        useful = {name: hello for name, hello in hellos.items() if self._would_use(name, hello)}
        variants = self._variants(hellos, before, slow)
        # Members without use are tried first all the same, because the error names them as well.
        if len(useful) < len(hellos):
            variants = itertools.chain(variants, self._variants(useful, before, slow))
        for variant in variants:
            try:
                return self._choose({name: hellos[name] for name in variant.members}, variant)
            except ConvoyError as error:
                refused = refused or error
        assert refused is not None
        raise PlanError(refused.message, hint=refused.hint) from refused

    def can_spare(self, name: str, hellos: Mapping[str, Hello], before: Placement) -> bool:
        """Return whether the other members could hold the layers."""
        try:
            self.foresee({other: hello for other, hello in hellos.items() if other != name}, before)
        except PlanError:
            return False
        return True

    def keeps_room(self, before: Placement, after: Placement) -> bool:
        """Return whether as many tokens fit as before, or as many as are wanted."""
        options = self._options
        wanted = options.num_blocks * options.block_size or options.at_once * self._max_context()
        return report(after).max_kv_tokens >= min(report(before).max_kv_tokens, wanted)

    def same_bits(self) -> bool:
        """Return whether all members seen so far compute the same bits, so that layers can move freely."""
        return self._kernels <= set(EXACT_KERNELS) and len(self._kernels) == 1 and not self._told

    def near_tie(self) -> float:
        """Return the distance at which two tokens may change places under the kernels of plans so far."""
        return max(KERNELS[name].bounds.unsplit for name in self._kernels)

    def in_place_of(self, plan: Plan, member: str, standby: str, hello: Hello) -> Plan:
        """Return the same plan with ``standby`` in the place of ``member``.

        The standby loads its stage of that plan, but the plan is not run.
        """
        replace = msgspec.structs.replace
        stages = [
            replace(
                stage,
                member=standby if stage.member == member else stage.member,
                ranks=[standby if name == member else name for name in stage.ranks],
            )
            for stage in plan.stages
        ]
        kernels = [plan.kernel_of(position) for position in range(len(stages))]
        known = [*kernels, *self._kernels, *hello.kernels]
        own = next(kernel for kernel in known if kernel in hello.kernels)
        kernels = [own if standby in stage.holders else k for stage, k in zip(stages, kernels, strict=True)]
        one = len(set(kernels)) == 1
        return replace(
            plan, stages=stages, kernel=kernels[0] if one else MIXED, kernels=[] if one else kernels
        )

    def _would_use(self, name: str, hello: Hello) -> bool:
        """Return whether a member could hold any layer at all.

        A member that cannot must not keep the others from a plan.
        """
        spec, asked = self._spec, self._options.kv_dtype
        known = [kernel for kernel in hello.kernels if kernel in KERNELS] or ["float32"]
        forms = [held_form(one, unpacks=hello.unpacks) for one in known if holds_kv(one, asked)]
        if name == self._me.name or not forms:
            return name == self._me.name
        least = min(
            stage_bytes(spec, Span(layer, layer + 1), form)
            for layer in range(spec.num_layers)
            for form in forms
        )
        return can_take_part(hello, self._kernels) and hello.memory_bytes >= least

    def _variants(
        self, hellos: Mapping[str, Hello], before: Placement | None, slow: Collection[str]
    ) -> Iterator[_Variant]:
        """Yield the variants to try, at least one, in the order of the module's list."""
        kept, reason = ({}, "") if before is None else (_spans_of(before), before.reason)
        old = names_in(kept)
        spare = [
            name
            for name, hello in hellos.items()
            if name != self._me.name and (name in slow or (hello.standby and name not in old))
        ]
        active = [name for name in hellos if name not in spare]
        if old and set(old) <= set(active):
            yield _Variant(old, kept, reason)
        spans = self._options.spans
        if spans and set(names_in(spans)) <= set(active):
            yield _Variant(active, spans)
            if len(names_in(spans)) < len(active):
                yield _Variant(list(dict.fromkeys([self._me.name, *names_in(spans)])), spans)
        yield _Variant(active)
        by_memory = sorted(active, key=lambda name: hellos[name].memory_bytes)
        others = [name for name in by_memory if name != self._me.name]
        # One member with little memory must not keep the others from a plan.
        for count in range(1, len(others)):
            yield _Variant([name for name in active if name not in others[:count]])
        lost = [name for name in old if name not in active]
        free = [name for name in spare if name not in old]
        orders = itertools.permutations(free, len(lost)) if lost else iter(())
        for order in itertools.islice(orders, _MAX_STANDBY_ORDERS):
            stand_in = dict(zip(lost, order, strict=True))
            changed = {_with(key, stand_in): span for key, span in kept.items()}
            yield _Variant(names_in(changed), changed, reason)
        spare.sort(key=lambda name: name in old)
        for count in range(1, len(spare) + 1):
            yield _Variant([*active, *spare[:count]])

    def _choose(self, hellos: Mapping[str, Hello], variant: _Variant, *, fewer: bool = True) -> _Choice:
        """Return the stages of one variant.

        ``fewer`` accepts fewer ranks than were asked for, because a member may be lost.
        """
        kernels = agree_kernels(hellos, self._me.name, self._kernels)
        require_kv(self._options.kv_dtype, kernels)
        offers = [
            MemberOffer(
                name,
                hello.memory_bytes,
                name == self._me.name,
                self._verifier.level(name),
                hello.num_threads,
                kernel=kernels[name],
                unpacks=hello.unpacks,
            )
            for name, hello in sorted(hellos.items(), key=lambda item: self._rank(item[0]))
        ]
        with self._verifier.explain():
            placement = self._place(offers, variant, fewer=fewer, against=self._against_ranks(hellos))
        used = [kernels[stage.member] for stage in placement.stages]
        dtype = agree_dtype({name: hellos[name] for name in placement.holders}, self._me.name, used)
        return _Choice(placement, hellos, kernels, dtype)

    def _against_ranks(self, hellos: Mapping[str, Hello]) -> str | None:
        """Return the reason why ranks of these members cannot join; None if they can."""
        if self._failed is not None:
            return self._failed[1]
        joined = next((name for name, hello in hellos.items() if RANKS in hello.device), None)
        return None if joined is None else f"{joined} has ranks of its own, on {hellos[joined].device}"

    def _place(
        self, offers: Sequence[MemberOffer], variant: _Variant, *, fewer: bool, against: str | None
    ) -> Placement:
        """Return a placement. Raises an error with the reason if the wish cannot be met."""
        options = self._options
        rules = options.member.policy.placement
        found = find_placements(self._spec, offers, variant.spans, rules, ranks=options.ranks, fewer=fewer)
        placement = choose_placement(options.parallel, found, predict=self._predict, collective=against)
        return dataclasses.replace(placement, reason=variant.reason) if variant.reason else placement

    def _tell_other_bits(self, hellos: Mapping[str, Hello], kernel: str) -> None:
        """Warn once of each member that computes other bits than the head, as long as they stay the same."""
        for name in other_bits(hellos, self._me.name, kernel):
            if (name, hellos[name].bits) not in self._told:
                self._told.add((name, hellos[name].bits))
                text = "%s computes other bits than %s: a text may change when layers move between them"
                _log.warning(text, name, self._me.name)

    def _plan(self, choice: _Choice) -> PlannedStages:
        """Return the plan of a choice, and warn of members in it that compute other bits."""
        placement, of_all = choice.placement, set(choice.kernels.values())
        self._tell_other_bits(choice.hellos, MIXED if len(of_all) > 1 else choice.kernels[self._me.name])
        kernels = [choice.kernels[stage.member] for stage in placement.stages]
        kernel = kernels[0] if len(set(kernels)) == 1 else MIXED
        has_peers = set(placement.holders) != {self._me.name}
        plan = Plan(
            plan_id=self._ids.next(),
            model=self._source.name,
            model_digest=self._source.digest,
            stages=list(placement.stages),
            kernel=kernel,
            activation_dtype=choice.dtype,
            block_size=self._options.block_size,
            max_context=self._max_context(),
            manifest=self._manifest() if has_peers else "",
            kernels=kernels if kernel == MIXED else [],
            hub=self._hub if has_peers else "",
            own_hub=self._options.member.hub is not None,
            kv_dtype=self._options.kv_dtype,
        )
        return PlannedStages(plan, placement)

    def _rank(self, name: str) -> int:
        """Return a sort key: the head first, then the others as the roster lists them."""
        names = [member.name for member in self._me.roster.members]
        if name == self._me.name:
            return -1
        # A member may have been removed from the roster a moment ago.
        return names.index(name) if name in names else len(names)

    def _max_context(self) -> int:
        context = self._source.spec.max_context
        return min(context, self._options.max_context) if self._options.max_context else context


def _spans_of(placement: Placement) -> dict[str, str]:
    num_layers = placement.spec.num_layers
    return {
        JOINT.join(stage.holders): format_span(Span(stage.start, stage.end, stage.output), num_layers)
        for stage in placement.stages
    }


def _with(key: str, stand_in: Mapping[str, str]) -> str:
    """Return the members of a span, with a stand-in in the place of each lost one."""
    return JOINT.join(stand_in.get(name, name) for name in split_key(key))
