"""Which plan to run with those who are here: the way that was asked for, or after a loss the next best.

In this order, and the first that fits: the stages as they were, where all their members are here; the spans
that a person gave, where all whom they name are here; all members that are no standbys, by themselves, and
without those of the least memory; a standby in the place of each lost member, so that nobody else loads
anything; members and standbys together. Who was given up for being slow counts as a standby.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from convoy.cluster.offer import MIXED, agree_dtype, agree_kernels, can_take_part, other_bits
from convoy.cluster.options import HeadOptions
from convoy.cluster.vetting import Vetting
from convoy.errors import ConvoyError, PlanError
from convoy.model.selfcheck import EXACT
from convoy.model.source import ModelSource
from convoy.plan.kernels import FORMS
from convoy.plan.memory import stage_bytes
from convoy.plan.placement import MemberOffer, Placement, place
from convoy.plan.report import report
from convoy.plan.span import Span, format_span
from convoy.transport.membership import Membership
from convoy.wire.messages import Hello, Plan

_log = logging.getLogger(__name__)

_MAX_STANDBY_ORDERS = 24


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan and where it came from."""

    plan: Plan
    placement: Placement

    @property
    def members(self) -> set[str]:
        return {stage.member for stage in self.plan.stages}


class Planner:
    """Pure but for the clock, which names generations."""

    def __init__(
        self,
        me: Membership,
        source: ModelSource,
        options: HeadOptions,
        vetting: Vetting,
        manifest: Callable[[], str] = lambda: "",
        *,
        hub: str = "",
    ) -> None:
        """``manifest`` gives the digest of the model's manifest, for plans that have peers.

        ``hub``: the commit of a hub that peers may get their weights of; empty for none.
        """
        self._manifest = manifest
        self._hub = hub
        self._me = me
        self._source = source
        self._options = options
        self._vetting = vetting
        self._generation = 0
        self._kernels: frozenset[str] = frozenset()  # of the first plan, and so of all texts
        self._told: set[tuple[str, str]] = set()  # whose bits are others than the head's, and which

    def first(self, hellos: Mapping[str, Hello]) -> Proposal:
        """The plan of a bring-up. Raises `PlanError`, `SpanError` or `Incompatible`."""
        members = [name for name in hellos if not hellos[name].standby]
        proposal = self._propose({name: hellos[name] for name in members}, self._options.spans)
        self._kernels = frozenset(proposal.plan.kernels or [proposal.plan.kernel])
        return proposal

    def again(
        self, hellos: Mapping[str, Hello], before: Placement | None, slow: Collection[str] = ()
    ) -> Proposal:
        """The best plan after a loss; ``before`` None: nothing was lost, and better is wanted.

        Raises `PlanError` with why the members that are here, and no standby, do not do.
        """
        refused: ConvoyError | None = None
        useful = {name: hello for name, hello in hellos.items() if self._has_use_for(name, hello)}
        ways = self._ways(hellos, before, slow)
        if len(useful) < len(hellos):  # the error names those as well
            ways = itertools.chain(ways, self._ways(useful, before, slow))
        for members, spans in ways:
            try:
                return self._propose({name: hellos[name] for name in members}, spans)
            except ConvoyError as error:
                refused = refused or error
        assert refused is not None
        raise PlanError(refused.message, hint=refused.hint) from refused

    def can_spare(self, name: str, hellos: Mapping[str, Hello], before: Placement) -> bool:
        """Whether the others could hold the layers."""
        try:
            self.again({other: hello for other, hello in hellos.items() if other != name}, before)
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
            replace(stage, member=standby) if stage.member == member else stage for stage in plan.stages
        ]
        kernels = [plan.kernel_of(position) for position in range(len(stages))]
        known = [*kernels, *self._kernels, *hello.kernels]
        own = next(kernel for kernel in known if kernel in hello.kernels)
        kernels = [own if stage.member == standby else k for stage, k in zip(stages, kernels, strict=True)]
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
    ) -> Iterator[tuple[Sequence[str], Mapping[str, str] | None]]:
        """Members and spans to try. At least one way is always given."""
        old = {} if before is None else _spans_of(before)
        spare = [
            name
            for name, hello in hellos.items()
            if name != self._me.name and (name in slow or (hello.standby and name not in old))
        ]
        active = [name for name in hellos if name not in spare]
        if old and old.keys() <= set(active):
            yield list(old), old
        spans = self._options.spans
        if spans and spans.keys() <= set(active):
            yield active, spans
            if len(spans) < len(active):
                yield list(dict.fromkeys([self._me.name, *spans])), spans
        yield active, None
        by_memory = sorted(active, key=lambda name: hellos[name].memory_bytes)
        others = [name for name in by_memory if name != self._me.name]
        for count in range(1, len(others)):  # one with little memory must not keep the others from a plan
            yield [name for name in active if name not in others[:count]], None
        lost = [name for name in old if name not in active]
        free = [name for name in spare if name not in old]
        orders = itertools.permutations(free, len(lost)) if lost else iter(())
        for order in itertools.islice(orders, _MAX_STANDBY_ORDERS):
            stand_in = dict(zip(lost, order, strict=True))
            changed = {stand_in.get(name, name): span for name, span in old.items()}
            yield list(changed), changed
        spare.sort(key=lambda name: name in old)
        for count in range(1, len(spare) + 1):
            yield [*active, *spare[:count]], None

    def _propose(self, hellos: Mapping[str, Hello], spans: Mapping[str, str] | None) -> Proposal:
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
        rules = self._options.member.policy.placement
        with self._vetting.explain():
            placement = place(self._source.spec, offers, spans, rules)
        used = {stage.member: kernels[stage.member] for stage in placement.stages}
        dtype = agree_dtype({name: hellos[name] for name in used}, self._me.name, used.values())
        return Proposal(self._plan(placement, list(used.values()), dtype), placement)

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
        return Plan(
            generation=self._generation,
            model=self._source.name,
            model_digest=self._source.digest,
            stages=list(placement.stages),
            kernel=kernels[0] if len(set(kernels)) == 1 else MIXED,
            activation_dtype=dtype,
            block_size=self._options.block_size,
            max_context=self._max_context(),
            manifest=self._manifest() if len(placement.stages) > 1 else "",
            kernels=kernels if len(set(kernels)) > 1 else [],
            hub=self._hub if len(placement.stages) > 1 else "",
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
    return {s.member: format_span(Span(s.start, s.end, s.output), num_layers) for s in placement.stages}
