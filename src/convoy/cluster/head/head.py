"""The head of a cluster: the connected peers, its own stage, and the plan that runs over all of them.

1. Gather the peers of the roster, and greet them (`presence.peers`).
2. Place the layers over the members' offers (`planning`).
3. Send `Plan`. Every member loads its own stage at the same time.
4. Choose how many blocks of each cache group fit everywhere (`plan.memory.blocks`) and send `Activate`.
5. Steps may flow, until a member is lost. Then steps 2 to 4 are done once more (`recovery`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from convoy.cluster.active_plan import ActivePlan, NoRoom, common_blocks, plan_digest
from convoy.cluster.attestation.member_verifier import MemberVerifier
from convoy.cluster.handlers import HandlerTable, on, on_frame
from convoy.cluster.head.bring_up import begin
from convoy.cluster.head.executors import make_executor
from convoy.cluster.head.forecast import Forecaster
from convoy.cluster.head.planning import PlanIds, PlannedStages, Planner
from convoy.cluster.head.prefetch import HeadPrefetch
from convoy.cluster.head.pull import WeightPull
from convoy.cluster.head.stage_report import RoundTrips, describe_stages
from convoy.cluster.head.standbys import Standbys
from convoy.cluster.head.step_path import StepPaths
from convoy.cluster.head.step_time import StepTimes
from convoy.cluster.offer import without_mlx
from convoy.cluster.options import HeadOptions
from convoy.cluster.peer.loaded_plan import ranks_of, stage_options
from convoy.cluster.peer.ranks import RankHandlers, RankPeers
from convoy.cluster.presence.mailbox import PlanMailbox
from convoy.cluster.presence.peers import Peers
from convoy.cluster.status import Forecast, StageStatus, StandbyStatus, StepPath
from convoy.cluster.weights.head_server import HeadWeightServer, doing
from convoy.cluster.weights.head_weights import HeadWeights
from convoy.engine.ranks.load import load_member_stage
from convoy.engine.run.deadline import StepClock
from convoy.engine.run.executor import Executor
from convoy.engine.run.stage_worker import StepLog
from convoy.errors import (
    ConvoyError,
    LinkClosed,
    PeerError,
    PlanError,
)
from convoy.model.backends.registry import why_not_on_mlx
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.release_memory import release_freed
from convoy.model.stage import LoadedStage, Stage
from convoy.plan.memory.blocks import Room
from convoy.plan.placement.modes import Predict
from convoy.plan.placement.route import Route
from convoy.plan.spec.model import ModelSpec
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.transport.member import Roster
from convoy.transport.membership import Membership
from convoy.transport.network import Network, TcpNetwork
from convoy.wire.messages.control import (
    Activate,
    Activated,
    BlocksDone,
    FrameType,
    Hello,
    Plan,
    Progress,
    Reached,
    Ready,
    Refuse,
    SampleReplies,
    StepFailed,
)
from convoy.wire.messages.evidence import Challenge, Evidence, Vouched
from convoy.wire.messages.fetch import Fetch, Held, Piece, Prepared, Unload
from convoy.wire.messages.ranks import Agree

_log = logging.getLogger(__name__)

# The member, the loaded bytes and the total bytes.
LoadProgress = Callable[[str, int, int], None]


class Head:
    """Run the head's side of a cluster: its peers, its stage, the plan and the executor over all of them."""

    def __init__(
        self,
        me: Membership,
        source: ModelSource,
        options: HeadOptions,
        network: Network | None = None,
        watch: Callable[[], None] | None = None,
        *,
        own: HeadWeights | None = None,
    ) -> None:
        """Prepare to bring the cluster up.

        ``watch`` is called while waiting for peers; an error that it raises ends the bring-up. ``own`` is
        set if ``source`` is not here whole, and fetches the head's tensors. Raises `ConfigError` for
        options that make no sense, and for a policy that names an unknown member.
        """
        options.check()
        options.check_context(source.spec)
        options.member.policy.check_members([member.name for member in me.roster.members])
        self._watch = watch or (lambda: None)
        self._me = me
        self._options = options
        self.on_lost: Callable[[], None] = lambda: None
        self.on_joined: Callable[[str], None] = lambda _name: None
        self.peers = Peers(
            *(me, network or TcpNetwork(), options),
            receive=self._receive,
            lost=self._lost,
            joined=self._joined,
            why_not_mlx=why_not_on_mlx(source),
        )
        self._plan_ids = PlanIds()
        self.preparations = HeadPrefetch(me.name, self.peers, lambda: self.planner, options.load_wait_s)
        self.pull = WeightPull(options.member, self.preparations, self._planner, self._hellos_for)
        self._choose(source, own)
        self.clock = StepClock(options.step_timeout_s)
        self._steps = StepLog()
        self._paths = StepPaths()
        self._trips = RoundTrips()
        # The head's own stage.
        self._stage: LoadedStage | None = None
        # The ranks of that stage, if others hold it too.
        self._ranks: RankPeers | None = None
        self._members: set[str] = set()
        self._receiver: PlanMailbox | Executor | None = None
        self._closed = False
        self.failed: str | None = None
        self.executor: Executor | None = None
        # The newest plan. It stays here after `unload`.
        self.active_plan: ActivePlan | None = None
        self._is_loaded = False

    def _choose(self, source: ModelSource, own: HeadWeights | None) -> None:
        """Make all parts of the head that know the model."""
        me, options = self._me, self._options
        self._source, self._own = source, own
        self._weights = weights = HeadWeightServer(source, options.member, own, self.peers.present)
        times = StepTimes(self.peers, options.member, source)
        self.planner = self._planner(source, weights, times.step_s)
        self._forecaster = Forecaster(me.name, self.planner, times.rates, options)
        self._standbys = Standbys()
        self.handlers = self._make_handlers()

    def _planner(
        self, source: ModelSource, weights: HeadWeightServer | None = None, predict: Predict | None = None
    ) -> Planner:
        return Planner(
            *(self._me, source, self._options, self.peers.verifier),
            manifest=lambda: "" if weights is None else weights.manifest().digest,
            hub="" if weights is None else weights.hub,
            predict=predict,
            ids=self._plan_ids,
        )

    @property
    def verifier(self) -> MemberVerifier:
        return self.peers.verifier

    @property
    def stage(self) -> Stage | None:
        """Return the head's own stage, if it has layers."""
        return self._stage

    @property
    def weight_server(self) -> HeadWeightServer:
        """Return the server of the model's weights."""
        return self._weights

    @property
    def own_weights(self) -> HeadWeights | None:
        """Return the source of the head's own tensors, if it lacks some."""
        return self._own

    def context_of(self, spec: ModelSpec) -> int:
        """Return the most tokens of one request to a model, as far as the options bound them."""
        return min(spec.max_context, self._options.max_context or spec.max_context)

    @property
    def links(self) -> dict[str, Link]:
        """Return a copy of the links to the connected peers."""
        return {name: link for name, (link, _) in self.peers.present().items()}

    @property
    def manifest(self) -> str:
        """Return the digest of the model's manifest."""
        return self._weights.manifest().digest

    @property
    def membership(self) -> Membership:
        return self._me

    @property
    def name(self) -> str:
        return self._me.name

    @property
    def roster(self) -> Roster:
        return self._me.roster

    def bring_up(self, on_load: LoadProgress | None = None) -> ActivePlan:
        """Do everything up to the first step, and return the plan that runs.

        Raises `PeerError`, `PlanError` or `ModelError`; then the links are closed.
        """
        try:
            self.peers.require(self.peers.gather(self._watch))
            self._hash(self._watch, on_load)
            return self._begin(self._watch, on_load, waits=self._options.keep_waiting)
        except BaseException:
            self.close("the head could not bring the cluster up")
            raise

    def _begin(
        self, watch: Callable[[], None], on_load: LoadProgress | None, *, waits: bool = False
    ) -> ActivePlan:
        return begin(
            self.peers,
            self.planner,
            self.hellos,
            lambda proposal: self.install(proposal, watch, on_load),
            replaceable=self._options.parallel != "tensor",
            watch=watch if waits else None,
        )

    def check_fit(self, source: ModelSource) -> None:
        """Raise `PlanError` with the reason if `load` of a model would find no plan for it, were it alone.

        Standbys do not count, because a first plan gives them no layers.
        """
        self._options.check_context(source.spec)
        planner = self.planner if source is self._source else self._planner(source)
        planner.check_first(self._hellos_for(source))

    def _hellos_for(self, source: ModelSource) -> dict[str, Hello]:
        hellos, why_not = self.hellos(), why_not_on_mlx(source)
        return {name: without_mlx(hello) for name, hello in hellos.items()} if why_not else hellos

    def unload(self, why: str) -> None:
        """End the plan, and free its weights here and on every peer, which hear why. The links stay."""
        self.on_lost, self.on_joined = lambda: None, lambda _name: None
        self.peers.on_gone = lambda _name, _why: None
        self.stop()
        self.peers.idle.begin(self._members - {self.name})
        self._is_loaded, self._members = False, set()
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.give_up()
        release_freed()
        for link in self.links.values():
            # A link that ended needs no message, because its peer drops all that it loaded.
            with suppress(ConvoyError):
                # A queue that stays full ends the link.
                if not link.post(Unload(why)):
                    link.send(Unload(why))

    def load(
        self, source: ModelSource, own: HeadWeights | None = None, on_load: LoadProgress | None = None
    ) -> ActivePlan:
        """Run a model over the connected members after `unload`: another one, or the same again.

        Raises as `bring_up` does; then no model is loaded, and the links stay.
        """
        if source is not self._source:
            self._forecaster.close()
            self._weights.close()
            self.peers.judge_mlx(why_not_on_mlx(source))
            self._choose(source, own)
        try:
            self._hash(self._require_open, on_load)
            self.verifier.settle(self._require_open)
            return self._begin(self._require_open, on_load)
        except BaseException:
            self.unload("the model could not be loaded")
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise LinkClosed("the head is shutting down")

    def _hash(self, watch: Callable[[], None], on_load: LoadProgress | None) -> None:
        """Compute the manifest that peers compare their weights with. The first time reads all files."""

        def progress(done: int, total: int) -> None:
            watch()
            if on_load is not None:
                on_load(doing(self.name, "check"), done, total)

        self._weights.manifest(progress)

    def seek(self, on_lost: Callable[[], None], on_joined: Callable[[str], None]) -> None:
        """Dial missing members from now on, and report each loss and each arrival.

        The hooks are set first, so that none is missed.
        """
        self.on_lost, self.on_joined = on_lost, on_joined
        self.peers.seek()

    def hellos(self) -> dict[str, Hello]:
        """Return the offers of the connected members, the head's first."""
        return {self.name: self.peers.hello} | {
            name: hello for name, (_, hello) in self.peers.present().items()
        }

    def install(
        self, proposal: PlannedStages, watch: Callable[[], None], on_load: LoadProgress | None = None
    ) -> ActivePlan:
        """Load and activate a plan, and make its executor. Call `stop` first if another plan ran.

        ``watch`` is called meanwhile; an error that it raises ends the work. Raises `PeerError`,
        `PlanError` or `ModelError`; then ``failed`` names the peer at fault, if one is.
        """
        plan = proposal.plan
        links = self.peers.require(sorted(proposal.members - {self.name}))
        mailbox = PlanMailbox(watch, plan.plan_id)
        self._receiver, self._members, self.failed = mailbox, proposal.members, None
        try:
            for link in links.values():
                link.send(plan, plan_id=plan.plan_id)
            self._stage = stage = self._load(plan, watch, on_load)
            # The head loads its own stage while the peers load theirs, and only then waits for them.
            readies = self._gather_ready(mailbox, links, on_load)
            active = self._activate(proposal, stage, mailbox, links, readies)
        except BaseException:
            self.failed = self.failed or mailbox.failed
            self._end_ranks()
            raise
        finally:
            self._receiver = None
            mailbox.close()
        self._run(active, links)
        return active

    def stop(self) -> None:
        """End the plan: drop its frames and free its K/V. The stage keeps its weights."""
        self.verifier.pause()
        self._end_ranks()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        if self.executor is not None:
            self.executor.close()
        if self._stage is not None:
            self._stage.forget()

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def route(self) -> Route:
        """Return the way of a token through the connected members. Stages may be missing."""
        active = self.active_plan
        assert active is not None, "route() before bring_up()"
        here = {self.name, *self.peers.present()}
        return active.placement.route.without(active.members - here)

    def stages(self, *, measures: bool = True) -> list[StageStatus]:
        """Return the state of each stage now; with ``measures``, with a fresh round trip to each peer."""
        # Read it once: another plan may come meanwhile.
        active = self.active_plan
        assert active is not None, "stages() before bring_up()"
        levels = {name: self.verifier.level(name).text for name in active.members}
        origins, links = self._weights.origins, self.links
        return describe_stages(
            *(active, self.name, self._me.roster, links, levels),
            hellos=self.hellos(),
            round_trip=self._trips.measure if measures else self._trips.last,
            origins=origins,
        )

    def step_path(self) -> StepPath | None:
        """Return where the last step over several members spent its time; None if that is not known."""
        active = self.active_plan
        assert active is not None, "step_path() before bring_up()"
        return self._paths.find(active.plan, self.name, self._steps.ended(), self.peers.marks)

    def forecast(self, *, is_idle: bool) -> Forecast | None:
        """Return what the planner foresees for this plan and these offers; None until it is computed.

        Another thread computes it. ``is_idle`` allows it to measure this machine's speed.
        """
        active, hellos = self.active_plan, self.hellos()
        if active is None or not active.members <= hellos.keys():
            return None
        return self._forecaster.find(active, hellos, is_idle=is_idle)

    def sealed_bytes(self) -> int:
        """Return the bytes that the head sent and received in sealed frames."""
        return self.peers.sealed_bytes()

    def close(self, reason: str = "the head is shutting down") -> None:
        """Say goodbye on every link. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._forecaster.close()
        self._weights.close()
        self._end_ranks()
        receiver = self._receiver
        if receiver is not None:
            receiver.close()
        if self.executor is not None:
            self.executor.close()
        self.peers.close(reason)

    # 3. load

    def _load(self, plan: Plan, watch: Callable[[], None], on_load: LoadProgress | None) -> LoadedStage:
        position, mine = next((i, one) for i, one in enumerate(plan.stages) if one.member == self.name)
        options = stage_options(plan, position, self._options.member, self._source)
        self._ranks = ranks = ranks_of(
            *(plan, plan_digest(plan), position, self.name, self._source.spec),
            options=self._options.member,
        )

        def progress(done: int, total: int) -> None:
            watch()
            if on_load is not None:
                on_load(self.name, done, total)

        self._weights.make_ready(
            mine, watch, lambda what, *far: None if on_load is None else on_load(doing(self.name, what), *far)
        )
        before, self._stage = self._stage, None
        if ranks is not None:
            return ranks.load(self._source, mine, options, progress, before=before)
        return load_member_stage(self._source, mine, options, progress, before=before)

    def _gather_ready(
        self, mailbox: PlanMailbox, links: dict[str, Link], on_load: LoadProgress | None
    ) -> dict[str, Ready]:
        def tell(peer: str, said: Progress) -> None:
            if on_load is not None:
                on_load(self._weights.heard(peer, said), said.loaded_bytes, said.total_bytes)

        return mailbox.gather(links, Ready, self._options.load_wait_s, tell)

    def _room_of(self, name: str, ready: Ready) -> Room:
        """Return the room that a peer has for K/V: no more than the policy lets count of its memory."""
        policy = self._options.member.policy
        used = ready.weight_bytes + ready.room_bytes
        return Room(policy.capped(name, used, head=False) - ready.weight_bytes, ready.block_bytes)

    # 4. activate

    def _activate(
        self,
        proposal: PlannedStages,
        stage: Stage,
        mailbox: PlanMailbox,
        links: dict[str, Link],
        readies: dict[str, Ready],
    ) -> ActivePlan:
        plan = proposal.plan
        room = Room(stage.room_bytes(self.peers.hello.memory_bytes), stage.block_bytes)
        rooms = {self.name: room} | {name: self._room_of(name, ready) for name, ready in readies.items()}
        try:
            num_blocks = common_blocks(
                self._source.spec, rooms, plan, self._options, is_first=not self._is_loaded
            )
        except NoRoom as error:
            self.failed = error.member
            raise PlanError(error.message, hint=error.hint) from error
        stage.make_pools(num_blocks)
        activate = Activate(plan.plan_id, plan_digest(plan), list(num_blocks))
        for name in readies:
            links[name].send(activate, plan_id=plan.plan_id)
        try:
            if self._ranks is not None:
                self._ranks.join_here(links)
            mailbox.gather(readies, Activated, self._options.answer_s)
        except (PeerError, LinkClosed) as error:
            self._note_failed_ranks(proposal, error)
            raise
        weights = {self.name: stage.weight_bytes} | {n: r.weight_bytes for n, r in readies.items()}
        num_places = len(plan.stages) - 1 + stage.num_devices
        return ActivePlan(plan, proposal.placement, weights, num_blocks, plan.max_context, num_places)

    def _note_failed_ranks(self, proposal: PlannedStages, error: ConvoyError) -> None:
        """Remember that the ranks could not join, unless the operator demanded ranks.

        The next plan over the same members then has whole layers.
        """
        if self._ranks is not None:
            self.failed = self.failed or self._ranks.culprit
        if proposal.placement.mode != "tensor" or self._options.parallel == "tensor":
            return
        self.planner.tensor_failed(self.hellos(), error.message)
        _log.warning("%s; its members share the layers as a pipeline instead", error.message)

    # 5. run

    def _run(self, active: ActivePlan, links: dict[str, Link]) -> None:
        leader = None if self._ranks is None else self._ranks.leader
        assert self._stage is not None
        self.clock.settle()
        # Steps of another plan took another way.
        self._steps = StepLog()
        self.executor = executor = make_executor(
            active,
            self._stage,
            leader,
            head=self.name,
            links=links,
            options=self._options,
            clock=self.clock,
            log=self._steps,
        )
        self._receiver = executor
        if self.active_plan is not None:
            self.peers.idle.begin(self.active_plan.members - active.members)
        self.active_plan, self._is_loaded = active, True
        _log.info("parallel: %s: %s", active.placement.mode, active.placement.reason)
        self.verifier.watch(links, active.plan)
        self.preload()

    def preload(self) -> None:
        """Ask standbys with enough memory to load the largest peer's stage, so that a loss finds it ready."""
        active = self.active_plan
        if active is None or not self._is_loaded:
            return
        self._standbys.preload_largest(active, self.name, self.peers.present(), self.planner.in_place_of)

    def standbys(self) -> list[StandbyStatus]:
        """Return the members that stand by, with the layers that each has loaded."""
        active = self.active_plan
        assert active is not None, "standbys() before bring_up()"
        return self._standbys.report(self.peers.present(), active.members)

    # Receiver threads.

    def _make_handlers(self) -> HandlerTable:
        """Return the handler of each frame that a peer may send."""
        attestation, sources = self.verifier.attestation, self._weights.sources
        ranks = RankHandlers(lambda: self._ranks, self._to_plan)
        connected = [
            on(Fetch, partial(self.pull.handle_fetch, self._weights)),
            on(Piece, sources.part_client.handle_piece),
            on(Held, sources.handle_held),
            on(Prepared, self.preparations.handle_prepared),
            *on_frame(Progress, handle=self._handle_progress),
            *on_frame(Agree, FrameType.PARTIAL, handle=ranks.handle_sum),
            *on_frame(BlocksDone, FrameType.BLOCKS, handle=ranks.handle_kv),
            *on_frame(StepFailed, Refuse, handle=ranks.handle_failure),
            *on_frame(Hello, Ready, Activated, SampleReplies, FrameType.HIDDEN, handle=self._to_plan),
        ]
        return HandlerTable(
            [
                # A peer is asked for evidence before it is admitted.
                on(Challenge, attestation.handle_challenge),
                on(Evidence, attestation.handle_evidence),
                on(Vouched, attestation.relay.handle_vouched),
                on(Reached, self.peers.handle_reached),
                *((kind, self.peers.after_greeting(handle)) for kind, handle in connected),
            ]
        )

    def _receive(self, link: Link, received: Received) -> None:
        self.handlers.handle(link, received)

    def _to_plan(self, link: Link, received: Received) -> None:
        """Hand a frame to the plan that is brought up or runs; without a stage in it, to the standbys."""
        receiver = self._receiver
        if receiver is not None and link.peer in self._members:
            receiver.deliver(link, received)
        else:
            self._standbys.note(link, received)

    def _handle_progress(self, link: Link, received: Received) -> None:
        said = received.message if isinstance(received, ReceivedMessage) else None
        if isinstance(said, Progress) and self.preparations.is_of_prefetch(link, said):
            self.preparations.handle_progress(link, said)
        else:
            self._to_plan(link, received)

    def _lost(self, link: Link, error: ConvoyError) -> None:
        """Report a loss.

        Before a plan runs, it may concern any member that the plan is made for; later, any member with a
        stage.
        """
        self._weights.ended(link)
        if self._ranks is not None:
            self._ranks.ended(link, error)
        receiver = self._receiver
        if receiver is not None and link.peer in self._members:
            receiver.lost(link, error)
            self.on_lost()

    def _joined(self, name: str) -> None:
        self.on_joined(name)
