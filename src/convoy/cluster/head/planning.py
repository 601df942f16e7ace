"""Which plan to run with those who are here: the way that was asked for, or after a loss the next best.

In this order, and the first that fits: the stages as they were, where all their members are here; the spans
that a person gave, where all whom they name are here; all members that are no standbys, by themselves, and
without those of the least memory; a standby in the place of each lost member, so that nobody else loads
anything; members and standbys together. Who was given up for being slow counts as a standby.

Where nobody said who holds what, `placement.ways` chooses for each of them whether members share layers as
ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from convoy.cluster.attestation.member_verifier import MemberVerifier
from convoy.cluster.offer import MIXED, agree_dtype, agree_kernels, can_take_part, other_bits
from convoy.cluster.options import HeadOptions
from convoy.errors import ConvoyError, PlanError
from convoy.model.backends.host.checks.selfcheck import EXACT
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import RANKS
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.placement.grouping import names_in
from convoy.plan.placement.placement import MemberOffer, Placement
from convoy.plan.placement.ways import Predict, choose_way, find_ways
from convoy.plan.report import report
from convoy.plan.span import JOINT, Span, format_span, split_key
from convoy.plan.spec.kernels import FORMS
from convoy.transport.membership import Membership
from convoy.wire.messages.control import Hello, Plan

_log = logging.getLogger(__name__)

_MAX_STANDBY_ORDERS = 24


@dataclass(frozen=True, slots=True)
class PlannedStages:
    """A plan and where it came from."""

    plan: Plan
    placement: Placement

    @property
    def members(self) -> set[str]:
        return {name for stage in self.plan.stages for name in stage.holders}


@dataclass(frozen=True, slots=True)
class _Way:
    """Members and spans to try. ``reason``: why these stages ran, where they are kept."""

    members: Sequence[str]
    spans: Mapping[str, str] | None = None
    reason: str = ""


class Planner:
    """Pure but for the clock, which names generations."""

    def __init__(
        self,
        me: Membership,
        source: ModelSource,
        options: HeadOptions,
        vetting: MemberVerifier,
        manifest: Callable[[], str] = lambda: "",
        *,
        hub: str = "",
        predict: Predict | None = None,
    ) -> None:
        """``manifest`` gives the digest of the model's manifest, for plans that have peers.

        ``hub``: the commit of a hub that peers may get their weights of; empty for none. ``predict`` says how
        long a step would take; without it nothing is chosen because it is faster.
        """
        self._predict = predict
        self._failed: tuple[frozenset[str], str] | None = None  # no collective came up among these, and why
        self._manifest = manifest
        self._hub = hub
        self._me = me
        self._source = source
        self._options = options
        self._vetting = vetting
        self._generation = 0
        self._kernels: frozenset[str] = frozenset()  # of the first plan, and so of all texts
        self._told: set[tuple[str, str]] = set()  # whose bits are others than the head's, and which

    def first(self, hellos: Mapping[str, Hello]) -> PlannedStages:
        """The plan of a bring-up. Raises `PlanError`, `SpanError` or `Incompatible`."""
        self._forget_failure(hellos)
        self._kernels = frozenset()  # of a first plan that did not come to run
        members = [name for name in hellos if not hellos[name].standby]
        way = _Way(members, self._options.spans)
        proposal = self._propose({name: hellos[name] for name in members}, way, fewer=False)
        self._kernels = frozenset(proposal.plan.kernels or [proposal.plan.kernel])
        return proposal

    def again(
        self, hellos: Mapping[str, Hello], before: Placement | None, slow: Collection[str] = ()
    ) -> PlannedStages:
        """The best plan after a loss; ``before`` None: nothing was lost, and better is wanted.

        Raises `PlanError` with why the members that are here, and no standby, do not do.
        """
        self._forget_failure(hellos)
        return self._again(hellos, before, slow)

    def tensor_failed(self, hellos: Collection[str], why: str) -> None:
        """Ranks could not begin together. It is not tried again by itself until others are here."""
        self._failed = frozenset(hellos), why

    def has_failed(self, hellos: Collection[str]) -> bool:
        """Whether ranks of these members could not begin together."""
        return self._failed is not None and self._failed[0] == frozenset(hellos)

    def _forget_failure(self, hellos: Collection[str]) -> None:
        if self._failed is not None and self._failed[0] != frozenset(hellos):
            self._failed = None

    def _again(
        self, hellos: Mapping[str, Hello], before: Placement | None, slow: Collection[str] = ()
    ) -> PlannedStages:
        refused: ConvoyError | None = None
        useful = {name: hello for name, hello in hellos.items() if self._has_use_for(name, hello)}
        ways = self._ways(hellos, before, slow)
        if len(useful) < len(hellos):  # the error names those as well
            ways = itertools.chain(ways, self._ways(useful, before, slow))
        for way in ways:
            try:
                return self._propose({name: hellos[name] for name in way.members}, way)
            except ConvoyError as error:
                refused = refused or error
        assert refused is not None
        raise PlanError(refused.message, hint=refused.hint) from refused

    def can_spare(self, name: str, hellos: Mapping[str, Hello], before: Placement) -> bool:
        """Whether the others could hold the layers."""
        try:
            self._again({other: hello for other, hello in hellos.items() if other != name}, before)
        except PlanError:
            return False
        return True

    def keeps_room(self, before: Placement, after: Placement) -> bool:
        """Whether as many tokens fit as before, or as many as are wanted."""
        options = self._options
        wanted = options.num_blocks * options.block_size or options.max_batch * self._max_context()
        return report(after).max_kv_tokens >= min(report(before).max_kv_tokens, wanted)

    def same_bits(self) -> bool:
        """Whether all members seen so far compute the same bits, so that layers move without a trace."""
        return self._kernels == {EXACT} and not self._told

    def in_place_of(self, plan: Plan, member: str, standby: str, hello: Hello) -> Plan:
        """The same plan with another member in one place: for a standby to load, not to run."""
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

    def _has_use_for(self, name: str, hello: Hello) -> bool:
        """Whether it could hold any layer at all; one that cannot must not keep the others from theirs."""
        spec = self._source.spec
        forms = [kernel for kernel in hello.kernels if kernel in FORMS] or ["float32"]
        least = min(
            stage_bytes(spec, Span(layer, layer + 1), form)
            for layer in range(spec.num_layers)
            for form in forms
        )
        runs = can_take_part(hello, self._kernels)
        return name == self._me.name or (runs and hello.memory_bytes >= least)

    def _ways(
        self, hellos: Mapping[str, Hello], before: Placement | None, slow: Collection[str]
    ) -> Iterator[_Way]:
        """At least one is always given."""
        kept, reason = ({}, "") if before is None else (_spans_of(before), before.reason)
        old = names_in(kept)
        spare = [
            name
            for name, hello in hellos.items()
            if name != self._me.name and (name in slow or (hello.standby and name not in old))
        ]
        active = [name for name in hellos if name not in spare]
        if old and set(old) <= set(active):
            yield _Way(old, kept, reason)
        spans = self._options.spans
        if spans and set(names_in(spans)) <= set(active):
            yield _Way(active, spans)
            if len(names_in(spans)) < len(active):
                yield _Way(list(dict.fromkeys([self._me.name, *names_in(spans)])), spans)
        yield _Way(active)
        by_memory = sorted(active, key=lambda name: hellos[name].memory_bytes)
        others = [name for name in by_memory if name != self._me.name]
        for count in range(1, len(others)):  # one with little memory must not keep the others from a plan
            yield _Way([name for name in active if name not in others[:count]])
        lost = [name for name in old if name not in active]
        free = [name for name in spare if name not in old]
        orders = itertools.permutations(free, len(lost)) if lost else iter(())
        for order in itertools.islice(orders, _MAX_STANDBY_ORDERS):
            stand_in = dict(zip(lost, order, strict=True))
            changed = {_with(key, stand_in): span for key, span in kept.items()}
            yield _Way(names_in(changed), changed, reason)
        spare.sort(key=lambda name: name in old)
        for count in range(1, len(spare) + 1):
            yield _Way([*active, *spare[:count]])

    def _propose(self, hellos: Mapping[str, Hello], way: _Way, *, fewer: bool = True) -> PlannedStages:
        """``fewer``: ranks than were asked for do as well, because somebody may be lost."""
        kernels = agree_kernels(hellos, self._me.name, self._kernels)
        self._tell_other_bits(hellos, kernels[self._me.name] if len(set(kernels.values())) == 1 else MIXED)
        offers = [
            MemberOffer(
                name,
                hello.memory_bytes,
                name == self._me.name,
                self._vetting.level(name),
                hello.num_threads,
                kernel=kernels[name],
            )
            for name, hello in sorted(hellos.items(), key=lambda item: self._rank(item[0]))
        ]
        with self._vetting.explain():
            placement = self._place(offers, way, fewer=fewer, against=self._against_ranks(hellos))
        used = [kernels[stage.member] for stage in placement.stages]
        dtype = agree_dtype({name: hellos[name] for name in placement.holders}, self._me.name, used)
        return PlannedStages(self._plan(placement, used, dtype), placement)

    def _against_ranks(self, hellos: Mapping[str, Hello]) -> str | None:
        """Why no ranks of these members can begin together."""
        if self._failed is not None:
            return self._failed[1]
        joined = next((name for name, hello in hellos.items() if RANKS in hello.device), None)
        return None if joined is None else f"{joined} has ranks of its own, on {hellos[joined].device}"

    def _place(
        self, offers: Sequence[MemberOffer], way: _Way, *, fewer: bool, against: str | None
    ) -> Placement:
        """Raises why what is asked for cannot be."""
        options = self._options
        rules = options.member.policy.placement
        found = find_ways(self._source.spec, offers, way.spans, rules, ranks=options.ranks, fewer=fewer)
        placement = choose_way(options.parallel, found, predict=self._predict, collective=against)
        return dataclasses.replace(placement, reason=way.reason) if way.reason else placement

    def _tell_other_bits(self, hellos: Mapping[str, Hello], kernel: str) -> None:
        """Once for each member, as long as it stays so."""
        for name in other_bits(hellos, self._me.name, kernel):
            if (name, hellos[name].bits) not in self._told:
                self._told.add((name, hellos[name].bits))
                text = "%s computes other bits than %s: a text may change when layers move between them"
                _log.warning(text, name, self._me.name)

    def _plan(self, placement: Placement, kernels: list[str], dtype: str) -> Plan:
        """``kernels``: of each stage."""
        # Grows over restarts too, so that frames of an earlier head are told apart; a clock may go back.
        self._generation = max(time.time_ns(), self._generation + 1)
        has_peers = set(placement.holders) != {self._me.name}
        return Plan(
            generation=self._generation,
            model=self._source.name,
            model_digest=self._source.digest,
            stages=list(placement.stages),
            kernel=kernels[0] if len(set(kernels)) == 1 else MIXED,
            activation_dtype=dtype,
            block_size=self._options.block_size,
            max_context=self._max_context(),
            manifest=self._manifest() if has_peers else "",
            kernels=kernels if len(set(kernels)) > 1 else [],
            hub=self._hub if has_peers else "",
            own_hub=self._options.member.hub is not None,
        )

    def _rank(self, name: str) -> int:
        """The head first, then the others as the roster lists them."""
        names = [member.name for member in self._me.roster.members]
        if name == self._me.name:
            return -1
        return names.index(name) if name in names else len(names)  # taken out a moment ago

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
    """Whom a span is for, with others in the places of those who were lost."""
    return JOINT.join(stand_in.get(name, name) for name in split_key(key))
