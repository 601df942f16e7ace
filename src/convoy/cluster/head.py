"""The head of a cluster: its company, its own stage, and the plan that runs over all of them.

1. gather the peers of the roster, and greet them (`company`)
2. place the layers over what the members offer (`planning`)
3. send `Plan`; every member loads its own stage at the same time
4. choose how many blocks of each cache group fit everywhere (`plan.blocks`) and send `Activate`
5. steps may flow, until a member is lost; then 2 to 4 once more (`recovery`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from convoy.cluster.company import Company
from convoy.cluster.granted import Granted, plan_digest
from convoy.cluster.loaded import stage_options
from convoy.cluster.mailbox import Mailbox
from convoy.cluster.options import HeadOptions
from convoy.cluster.own_weights import OwnWeights
from convoy.cluster.picture import describe_stages
from convoy.cluster.planning import Planner, Proposal
from convoy.cluster.prepare import Preparations
from convoy.cluster.standbys import Standbys
from convoy.cluster.status import StageStatus, StandbyStatus
from convoy.cluster.supply import Supply, doing
from convoy.cluster.vetting import Vetting
from convoy.engine.deadline import StepClock
from convoy.engine.executor import Executor
from convoy.engine.local import LocalExecutor
from convoy.engine.pipeline import PipelineExecutor, PipelineOptions
from convoy.errors import CapacityError, ConvoyError, LinkClosed, PeerError, PlanError, SpanError
from convoy.model.source import ModelSource
from convoy.model.stage import Stage
from convoy.plan.blocks import Room, choose_blocks
from convoy.plan.route import Route
from convoy.transport.link import Link, Received
from convoy.transport.membership import Membership
from convoy.transport.network import Network, TcpNetwork
from convoy.wire.messages import Activate, Activated, Hello, Plan, Ready

_log = logging.getLogger(__name__)

LoadProgress = Callable[[str, int, int], None]  # member, loaded bytes, total bytes


class Head:
    """The head's side of a running cluster: its company, its stage, the plan and the executor over all."""

    def __init__(
        self,
        me: Membership,
        source: ModelSource,
        options: HeadOptions,
        network: Network | None = None,
        watch: Callable[[], None] | None = None,
        *,
        own: OwnWeights | None = None,
    ) -> None:
        """``watch`` is called while waiting for peers; what it raises ends the bring-up.

        ``own``: how its tensors come here, where ``source`` is not here whole.

        Raises `ConfigError` for options that make no sense.
        """
        options.check()
        self._watch = watch or (lambda: None)
        self._me = me
        self._source = source
        self._options = options
        self.on_lost: Callable[[], None] = lambda: None
        self.on_joined: Callable[[str], None] = lambda _name: None
        self.company = Company(
            me,
            network or TcpNetwork(),
            options,
            receive=self._deliver,
            lost=self._lost,
            joined=self._joined,
        )
        self._supply = Supply(source, options.member, own)
        vetting, supply = self.company.vetting, self._supply
        self.planner = Planner(me, source, options, vetting, lambda: self.manifest, hub=supply.hub)
        self._preparations = Preparations(me.name, self.company, self.planner, options.load_wait_s)
        self.clock = StepClock(options.step_timeout_s)
        self._standbys = Standbys()
        self._stage: Stage | None = None
        self._members: set[str] = set()
        self._receiver: Mailbox | PipelineExecutor | None = None
        self._closed = False
        self.failed: str | None = None
        self.executor: Executor | None = None
        self.granted: Granted | None = None

    @property
    def vetting(self) -> Vetting:
        return self.company.vetting

    @property
    def links(self) -> dict[str, Link]:
        """Of the peers that are here now: a copy."""
        return {name: link for name, (link, _) in self.company.present().items()}

    @property
    def manifest(self) -> str:
        """The digest of the model's manifest."""
        return self._supply.manifest().digest

    @property
    def name(self) -> str:
        return self._me.name

    def bring_up(self, on_load: LoadProgress | None = None) -> Granted:
        """Everything up to the first step.

        Raises `PeerError`, `PlanError` or `ModelError`; the links are closed then.
        """
        try:
            self.company.require(self.company.gather(self._watch))
            self._hash(on_load)
            return self._begin(on_load)
        except BaseException:
            self.close("the head could not bring the cluster up")
            raise

    def _hash(self, on_load: LoadProgress | None) -> None:
        """The manifest that peers compare their weights with; the first time takes a pass over all files."""

        def progress(done: int, total: int) -> None:
            self._watch()
            if on_load is not None:
                on_load(doing(self.name, "check"), done, total)

        self._supply.manifest(progress)

    def _begin(self, on_load: LoadProgress | None) -> Granted:
        """Over those who came. Where that fails for want of the others, raises why the first did not come."""
        absent = self.company.absent
        try:
            proposal = self.planner.first(self.hellos())
            for why in absent.values():
                _log.warning("%s; the cluster starts without it, and goes on dialling it", why.message)
            while True:
                try:
                    return self.install(proposal, self._watch, on_load)
                except (PeerError, LinkClosed) as error:
                    proposal = self._without_lost(proposal, error)
        except (CapacityError, SpanError) as error:
            for why in absent.values():
                raise why from error
            raise

    def _without_lost(self, before: Proposal, error: ConvoyError) -> Proposal:
        """Members ended while the first plan was loaded: as after a loss, those that are left hold the model.

        Raises ``error`` where that is not why, or where they cannot.
        """
        gone = before.members - {self.name} - self.company.present().keys()
        if not gone:
            raise error
        try:
            proposal = self.planner.again(self.hellos(), None)
        except ConvoyError:
            raise error from None
        _log.warning("%s; the cluster starts without %s", error.message, ", ".join(sorted(gone)))
        return proposal

    def seek(self, on_lost: Callable[[], None], on_joined: Callable[[str], None]) -> None:
        """From now on dial who is missing, and tell of who is lost and who comes: hooks first, so of each."""
        self.on_lost, self.on_joined = on_lost, on_joined
        self.company.seek()

    def hellos(self) -> dict[str, Hello]:
        """What those offer that are here, the head first."""
        return {self.name: self.company.hello} | {
            name: hello for name, (_, hello) in self.company.present().items()
        }

    def install(
        self, proposal: Proposal, watch: Callable[[], None], on_load: LoadProgress | None = None
    ) -> Granted:
        """Load, activate, and make the executor of this plan; `stop` was called if another one ran.

        ``watch`` is called meanwhile, and what it raises ends it. Raises `PeerError`, `PlanError` or
        `ModelError`; then ``failed`` names the peer because of which, if it was one.
        """
        plan = proposal.plan
        links = self.company.require(sorted(proposal.members - {self.name}))
        mailbox = Mailbox(watch, plan.generation)
        self._receiver, self._members, self.failed = mailbox, proposal.members, None
        try:
            for link in links.values():
                link.send(plan, generation=plan.generation)
            self._stage = stage = self._load(plan, watch, on_load)
            readies = self._gather_ready(mailbox, links, on_load)
            granted = self._activate(proposal, stage, mailbox, links, readies)
        except BaseException:
            self.failed = self.failed or mailbox.failed
            raise
        finally:
            self._receiver = None
            mailbox.close()
        self._run(granted, stage, links)
        return granted

    def stop(self) -> None:
        """The plan is over: its frames are for nobody, and its K/V is free. The stage's weights stay."""
        self.vetting.pause()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        if self.executor is not None:
            self.executor.close()
        if self._stage is not None:
            self._stage.forget()

    def route(self) -> Route:
        """The way of a token through those that are here: it may lack stages."""
        granted = self.granted
        assert granted is not None, "route() before bring_up()"
        here = {self.name, *self.company.present()}
        return granted.placement.route.without(granted.members - here)

    def stages(self) -> list[StageStatus]:
        """The picture of the cluster now, with a fresh round trip to each peer."""
        granted = self.granted  # one and the same for all: another may come meanwhile
        assert granted is not None, "stages() before bring_up()"
        levels = {name: self.vetting.level(name).text for name in granted.members}
        devices = {name: hello.device for name, hello in self.hellos().items()}
        return describe_stages(granted, self.name, self._me.roster, self.links, levels, devices=devices)

    def sealed_bytes(self) -> int:
        """All that the head sent and received in sealed frames."""
        return self.company.sealed_bytes()

    def close(self, reason: str = "the head is shutting down") -> None:
        """Say goodbye on every link. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._supply.close()
        receiver = self._receiver
        if receiver is not None:
            receiver.close()
        if self.executor is not None:
            self.executor.close()
        self.company.close(reason)

    # 3. load

    def _load(self, plan: Plan, watch: Callable[[], None], on_load: LoadProgress | None) -> Stage:
        position, mine = next((i, one) for i, one in enumerate(plan.stages) if one.member == self.name)
        options = stage_options(plan, position, self._options.member)

        def progress(done: int, total: int) -> None:
            watch()
            if on_load is not None:
                on_load(self.name, done, total)

        self._supply.make_ready(
            mine, watch, lambda what, *far: None if on_load is None else on_load(doing(self.name, what), *far)
        )
        before, self._stage = self._stage, None
        return Stage.load(self._source, mine, options, progress, before=before)

    def _gather_ready(
        self, mailbox: Mailbox, links: dict[str, Link], on_load: LoadProgress | None
    ) -> dict[str, Ready]:
        return mailbox.gather(
            links,
            Ready,
            self._options.load_wait_s,
            None
            if on_load is None
            else (lambda peer, p: on_load(doing(peer, p.stage), p.loaded_bytes, p.total_bytes)),
        )

    # 4. activate

    def _activate(
        self,
        proposal: Proposal,
        stage: Stage,
        mailbox: Mailbox,
        links: dict[str, Link],
        readies: dict[str, Ready],
    ) -> Granted:
        plan = proposal.plan
        room = Room(stage.room_bytes(self.company.hello.memory_bytes), stage.block_bytes)
        rooms = {self.name: room} | {n: Room(r.room_bytes, r.block_bytes) for n, r in readies.items()}
        num_blocks = self._choose_blocks(rooms, plan)
        stage.make_pools(num_blocks)
        activate = Activate(plan.generation, plan_digest(plan), list(num_blocks))
        for name in readies:
            links[name].send(activate, generation=plan.generation)
        mailbox.gather(readies, Activated, self._options.wait_s)
        weights = {self.name: stage.weight_bytes} | {n: r.weight_bytes for n, r in readies.items()}
        num_places = len(plan.stages) - 1 + stage.num_devices
        return Granted(plan, proposal.placement, weights, num_blocks, plan.max_context, num_places)

    def _choose_blocks(self, rooms: dict[str, Room], plan: Plan) -> tuple[int, ...]:
        groups = self._source.spec.cache_groups
        for name, room in rooms.items():
            if len(room.block_bytes) != len(groups) or min(room.block_bytes) < 0:
                self.failed = name
                raise PlanError(f"{name} does not say what a K/V block of each of {len(groups)} groups takes")
        demand = self._options.demand(block_size=plan.block_size, max_context=plan.max_context)
        choice = choose_blocks(groups, rooms, demand)
        # After a loss fewer are better than none: requests that need more end alone.
        least = self._options.num_blocks if self.granted is None and self._options.num_blocks else 1
        if choice.most < least:
            self.failed = choice.tightest
            raise PlanError(
                f"{choice.tightest} has memory for {choice.most} K/V blocks beside its weights, "
                f"and at least {least} are needed",
                hint="give that member fewer layers or more memory",
            )
        return choice.num_blocks

    # 5. run

    def _run(self, granted: Granted, stage: Stage, links: dict[str, Link]) -> None:
        plan = granted.plan
        self.clock.settle()
        if len(plan.stages) == 1:
            self.executor = LocalExecutor(stage, self._options.depth(granted.num_places))
        else:
            options = PipelineOptions(
                generation=plan.generation,
                depth=self._options.depth(granted.num_places),
                step_timeout_s=self._options.step_timeout_s,
                activation_dtype=plan.activation_dtype,
                max_step_tokens=max(self._options.max_step_tokens, self._options.prefill_chunk),
                overlaps=stage.overlaps,
            )
            self.executor = self._receiver = PipelineExecutor(
                stage, plan.stages, self.name, links, options, clock=self.clock
            )
        self.granted = granted
        self.vetting.watch(links, plan)
        self.preload()

    def preload(self) -> None:
        """Standbys that have the memory load the largest peer's stage, so that a loss finds it there."""
        granted = self.granted
        if granted is None:
            return
        largest = max(
            (name for name in granted.weight_bytes if name != self.name),
            key=lambda name: granted.weight_bytes[name],
            default=None,
        )
        if largest is None:
            return
        for name, (link, hello) in self.company.present().items():
            if not hello.standby or name in granted.members:
                continue
            fits = hello.memory_bytes >= granted.weight_bytes[largest]
            plan = self.planner.in_place_of(granted.plan, largest, name, hello) if fits else None
            self._standbys.preload(name, link, plan)

    def standbys(self) -> list[StandbyStatus]:
        """Who waits for the loss of another, and with which layers."""
        granted = self.granted
        assert granted is not None, "standbys() before bring_up()"
        return self._standbys.report(self.company.present(), granted.members)

    def _deliver(self, link: Link, received: Received) -> None:
        if self._supply.takes(link, received) or self._preparations.takes(link, received):
            return
        receiver = self._receiver
        if receiver is not None and link.peer in self._members:
            receiver.deliver(link, received)
        else:
            self._standbys.note(link, received)

    def _lost(self, link: Link, error: ConvoyError) -> None:
        """Before a plan runs, a loss is one of those that it is made for; then of those that hold a stage."""
        receiver = self._receiver
        if receiver is not None and link.peer in self._members:
            receiver.lost(link, error)
            self.on_lost()

    def _joined(self, name: str) -> None:
        self.on_joined(name)

    def prepare(self, name: str, then: Callable[[], None]) -> None:
        """``then``, once everybody has the weights for a plan with ``name``, whatever runs meanwhile."""
        self._preparations.joined(name, then)
