"""A peer's life: wait for the head, load the stage it plans, run its steps, and wait for the next head."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from convoy.cluster.active_plan import plan_digest
from convoy.cluster.attestation.exchange import Attestation
from convoy.cluster.handlers import Handler, HandlerTable, on, on_frame
from convoy.cluster.offer import make_hello
from convoy.cluster.options import PeerOptions
from convoy.cluster.peer.dials import Dials
from convoy.cluster.peer.event import PeerEvent
from convoy.cluster.peer.loaded_plan import LoadedPlan, could_not_leave, load_plan
from convoy.cluster.peer.plan_clock import SUPERSEDED, PlanClock
from convoy.cluster.peer.prefetch import PeerPrefetch
from convoy.cluster.peer.ranks import RankHandlers
from convoy.cluster.peer.refusal import refusal
from convoy.cluster.traffic import Traffic
from convoy.cluster.weights.peer_weights import Asker, PeerWeights
from convoy.engine.run.kv_server import MAX_REASON
from convoy.engine.stats import STEP_S, Histogram
from convoy.errors import ConvoyError, LinkClosed, PeerLeft, StepError
from convoy.model.kernels.release_memory import release_freed
from convoy.model.stage import LoadedStage
from convoy.transport.link.inbox import Inbox, weight_of
from convoy.transport.link.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.transport.log_limit import RateLimitedLog
from convoy.transport.membership import Membership
from convoy.transport.network import Network, TcpNetwork
from convoy.trust.evidence.verdict import Verdict
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import (
    MAX_OFFER_BYTES,
    Activate,
    Activated,
    BlocksDone,
    FrameType,
    Hello,
    Inquire,
    Plan,
    Reached,
    ReadBlocks,
    Ready,
    Refuse,
    Sender,
    Step,
    StepFailed,
    WriteBlocks,
)
from convoy.wire.messages.evidence import Challenge, Evidence, Vouch
from convoy.wire.messages.fetch import Fetch, Holding, Piece, Prepare, Unload
from convoy.wire.messages.ranks import Agree, RankOutput, RankStep

_log = logging.getLogger(__name__)

# A member that dials and is no head. The plan says whether it is the predecessor or rank 0.
_DIALLER = Sender.PREDECESSOR | Sender.LEADER
# The reasons that a peer gives its neighbours in the ring.
PLAN_IS_OVER = "the plan is over"
HEAD_IS_GONE = "its head is gone"


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """Describe a peer at one moment. ``plan_id`` is that of the loaded plan; 0 means no plan."""

    has_head: bool
    is_active: bool
    epoch: int
    plan_id: int
    num_layers: int
    weight_bytes: int


class Peer:
    """Run one peer. One thread owns the plan, the stage and its K/V; links only fill its bounded inbox."""

    def __init__(
        self,
        me: Membership,
        options: PeerOptions,
        on_event: Callable[[PeerEvent], None] | None = None,
        network: Network | None = None,
    ) -> None:
        self._me = me
        self._network = network or TcpNetwork()
        self._options = options
        self._on_event = on_event or (lambda _event: None)
        # A member that sends nonsense without end must not fill the disk.
        self._limited_log = RateLimitedLog(_log)
        self._inbox: Inbox[tuple[Link | None, Received | ConvoyError]] = Inbox()
        self.hello = msgspec.structs.replace(make_hello(options.member), standby=options.standby)
        # What a refused plan found to be left, which counts until a head comes on a new link.
        self._left_bytes = MAX_OFFER_BYTES
        self._attestation = Attestation.of(lambda: self._me.current, options.member, self._refuse_head)
        self._weights = PeerWeights(me.name, options)
        self._preparing = PeerPrefetch(me.name, self._weights)
        self._links: set[Link] = set()
        self._head: Link | None = None
        self._loaded: LoadedPlan | None = None
        # The stage of the plan that ended. The next plan may reuse its weights.
        self._kept: LoadedStage | None = None
        # The newest plan on the head's link. The head has given up every older one.
        self._plan_id = 0
        # The newest plan that came on that link. It may wait in the inbox while another is loaded.
        self._newest = PlanClock()
        self._dials = Dials(self._dial, self._begin_link)
        # The link of a head that is below this member's minimum evidence.
        self._refused: Link | None = None
        self._stopping = False
        self.handlers = self._make_handlers()
        self.traffic, self.step_s = Traffic(), Histogram(STEP_S)

    def facts(self) -> PeerFacts:
        """Return the state of this peer at this moment. Any thread may call it."""
        loaded, has_head, epoch = self._loaded, self._head is not None, self._me.roster.epoch
        if loaded is None:
            return PeerFacts(has_head, False, epoch, 0, 0, 0)
        own = loaded.assignment
        plan_id, num_layers = loaded.plan.plan_id, own.end - own.start
        return PeerFacts(has_head, loaded.is_active, epoch, plan_id, num_layers, loaded.stage.weight_bytes)

    @property
    def loaded(self) -> LoadedPlan | None:
        """Return the plan that is loaded here, with its stage."""
        return self._loaded

    @property
    def head(self) -> Link | None:
        """Return the link to the head."""
        return self._head

    @property
    def attestation(self) -> Attestation:
        """Return the exchange of evidence with the other members."""
        return self._attestation

    @property
    def weights(self) -> PeerWeights:
        """Return the source of this member's weights, which also serves them to others."""
        return self._weights

    @property
    def clock(self) -> PlanClock:
        """Return the clock of the head's plans."""
        return self._newest

    @property
    def plan_id(self) -> int:
        """Return the id of the newest plan that was taken up on the head's link; 0 for none."""
        return self._plan_id

    def held_bytes(self, member: str) -> int:
        """Return the bytes from ``member`` that wait to be handled."""
        return sum(self._inbox.held_bytes(link) for link in tuple(self._links) if link.peer == member)

    def run(self, bind: tuple[str, int]) -> None:
        """Serve until `stop`, or until the head goes if so configured.

        Raises `ConfigError` if the port is taken.
        """
        listener = self._network.listen(self._me, bind, self._greet)
        host, port = listener.address[:2]
        self._tell("listening", f"{self._me.name} listens on {host}:{port}")
        try:
            while not self._stopping:
                link, item = self._inbox.get()
                if link is not None:
                    self._handle(link, item)
        finally:
            listener.close()
            self._inbox.close()
            self._attestation.close()
            self._weights.close()
            for link in tuple(self._links):
                link.close("the peer is shutting down")

    def stop(self) -> None:
        """Make `run` return. Any thread may call it, but no signal handler, because it takes a lock."""
        self._stopping = True
        self._dials.abandon("this member is shutting down")
        if (loaded := self._loaded) is not None:
            loaded.end(StepError("this member is shutting down"))
        self._preparing.close("this member is shutting down")
        self._inbox.put_last(None, (None, StepError("stop")))

    # Receiver threads and the listener's threads: only fill the inbox.

    def _greet(self, link: Link) -> None:
        # Use the roster entry by which the link was judged, not a roster that was adopted since.
        from_head = link.facts.member.head
        self._attestation.attach(link)
        self._begin_link(link, frames_from(Sender.HEAD if from_head else _DIALLER))

    def _make_handlers(self) -> HandlerTable:
        """Return the handler of each frame that a head, a predecessor or another rank may send.

        All but `_queue` handle a frame on the receiver thread: it must not wait behind a stage that loads.
        """
        attestation, weights = self._attestation, self._weights
        ranks = RankHandlers(lambda: None if self._loaded is None else self._loaded.ranks, self._queue)
        from_head = [
            on(Piece, weights.part_client.handle_piece),
            on(Fetch, weights.server.handle_question),
            on(Holding, weights.server.handle_question),
            on(Inquire, self._handle_inquire),
        ]
        return HandlerTable(
            [
                on(Challenge, attestation.handle_challenge),
                on(Evidence, attestation.handle_evidence),
                on(Vouch, attestation.relay.handle_vouch),
                *((kind, self._if_head(handle)) for kind, handle in from_head),
                *on_frame(Hello, handle=self._handle_hello),
                *on_frame(Plan, Prepare, handle=self._handle_plan),
                *on_frame(Unload, handle=self._handle_unload),
                *on_frame(Agree, FrameType.PARTIAL, handle=ranks.handle_sum),
                *on_frame(BlocksDone, FrameType.BLOCKS, handle=ranks.handle_kv),
                *on_frame(StepFailed, handle=ranks.handle_failure),
                *on_frame(Activate, Step, ReadBlocks, WriteBlocks, FrameType.HIDDEN, handle=self._queue),
                *on_frame(RankStep, RankOutput, handle=self._queue),
            ]
        )

    def _queue(self, link: Link, received: Received) -> None:
        """Queue a frame for the peer's own thread, which also refuses it if it is out of place."""
        self._inbox.put(link, (link, received), weight_of(received))

    def _if_head(self, handle: Handler) -> Handler:
        """Return a handler that calls ``handle`` on the head's link, and queues on any other link."""

        def handle_from_head(link: Link, received: Received) -> None:
            (handle if link is self._head else self._queue)(link, received)

        return handle_from_head

    def _handle_hello(self, link: Link, received: Received) -> None:
        old = self._head
        if old is not None and old is not link and old.peer == link.peer:
            # The head came back. The peer's thread must not wait for another rank meanwhile.
            self._end_ring()
        self._queue(link, received)

    def _handle_plan(self, link: Link, received: Received) -> None:
        said = received.message if isinstance(received, ReceivedMessage) else None
        if link is self._head and isinstance(said, Prepare) and said.plan is not None:
            self._weights.server.note_prepared(link, said.plan)
        if link is self._head and isinstance(said, Plan):
            self._weights.server.note_plan(link, said)
        if link is self._head and isinstance(said, Plan) and said.plan_id > self._plan_id:
            # Note the plan before it is queued: work of the old plan ahead of it in the inbox is then
            # skipped.
            self._newest.note(said)
            self._dials.abandon(SUPERSEDED)
            self._end_ring()
        self._queue(link, received)

    def _handle_unload(self, link: Link, received: Received) -> None:
        if link is self._head:
            self._dials.abandon(SUPERSEDED)
            self._end_ring()
        self._queue(link, received)

    def _handle_inquire(self, link: Link, inquire: Inquire) -> None:
        loaded, plan_id = self._loaded, inquire.plan_id
        if loaded is not None and loaded.plan.plan_id == plan_id:
            reached = Reached(plan_id, loaded.finished_step, loaded.marks())
        else:
            reached = Reached(plan_id, -1)
        # If this post fails, the link is over and its end is reported separately.
        with contextlib.suppress(ConvoyError):
            link.post(reached)

    def _end_ring(self) -> None:
        """End waits of the old plan: no thread has to finish a send to an old neighbour, or a sum."""
        loaded = self._loaded
        if loaded is None:
            return
        loaded.end(StepError(SUPERSEDED))
        for link in loaded.neighbours():
            if link is not self._head:
                link.dismiss(PLAN_IS_OVER, revoke=True)

    def _ended(self, link: Link, error: ConvoyError) -> None:
        self.traffic.ended(link, error)
        self._attestation.detach(link)
        if (loaded := self._loaded) is not None:
            loaded.ended(link, error)
        if link is self._head:
            self._dials.abandon("the head is gone")
            self._weights.ended(link)
        self._inbox.put_last(link, (link, error))

    # The peer's own thread.

    def _handle(self, link: Link, item: Received | ConvoyError) -> None:
        if isinstance(item, ConvoyError):
            self.link_ended(link, item)
            return
        if self._newest.makes_needless(item):
            return
        try:
            if isinstance(item, ReceivedTensor):
                self._hidden(link, item)
            else:
                self._message(link, item)
        except ConvoyError as error:
            self._failed(item, error)
        except Exception as error:  # noqa: BLE001 - logged whole, and told to the head
            # Torch and the library raise what they like; a peer outlives one bad plan or step.
            self._limited_log.warning(type(error).__name__, "this member failed", with_trace=True)
            self._failed(item, StepError(f"internal error: {type(error).__name__}"))

    def _message(self, link: Link, received: ReceivedMessage) -> None:
        match received.message:
            case _ if link is self._refused or link.is_over:
                # These messages waited in the inbox while their head was refused or lost. They need no
                # answer.
                return
            case Hello():
                self._meet(link)
            case RankStep() | RankOutput() | ReadBlocks() | WriteBlocks() as order if (
                self._loaded is not None and self._loaded.is_led_by(link, received.plan_id)
            ):
                self._loaded.obey(link, order, received.plan_id)
            case message if link is not self._head:
                link.dismiss(f"{type(message).__name__} is for the head that greeted this member to send")
            case Plan() as plan:
                self._load(link, plan)
            case Prepare(plan=None):
                self._preparing.stop()
            case Prepare(plan=Plan() as plan):
                self._preparing.begin(link, plan)
            case Unload(why=why):
                self._unload(why)
            case Activate() as activate:
                self._activate(link, activate, received.plan_id)
            case Step() as step if self._loaded is not None and self._loaded.loop is not None:
                self._loaded.loop.accept_step(step, received.plan_id)
            case ReadBlocks() | WriteBlocks() as asked if self._loaded and self._loaded.kv_server is not None:
                self._loaded.kv_server.accept(asked, received.plan_id)
            case message:
                raise StepError(f"{type(message).__name__} came before a plan was active")

    def _meet(self, link: Link) -> None:
        old = self._head
        if old is not None and old is not link:
            if old.peer != link.peer:
                link.dismiss(f"{old.peer} is the head of {self._me.name} already")
                return
            # A head that came back may have restarted, so neither its plan nor the kept weights are reused.
            self._forget()
            self._tell("lost", "the head came back on a new link")
            old.dismiss("the head came back on a new link")
        if old is not link:
            # Only this link may plan from now on. Its clock may be behind the old link's.
            self._plan_id = 0
            self._newest.forget()
            self._left_bytes = MAX_OFFER_BYTES
        self._head = link
        stands_by = ", and this member stands by" if self._options.standby else ""
        self._tell("head", f"{link.peer} is here{stands_by}")
        link.send(self.hello)
        self._demand_evidence(link)

    def _present_offer(self) -> Hello:
        """Return the greeting with the memory that is left, at most what the owner of this member grants."""
        left_bytes = min(self.hello.memory_bytes, self._left_bytes)
        return msgspec.structs.replace(self.hello, memory_bytes=left_bytes)

    def _demand_evidence(self, link: Link) -> None:
        """Ask the head for evidence before it may plan here, if this member's own policy demands it."""
        if not self._attestation.policy.minimum:
            return
        verdict = self._attestation.check([link], watch=self._require_running)[link.peer]
        if self._attestation.suffices(verdict):
            self._attestation.watch([link], hold_stages=False)
        else:
            self._refuse_head(link, verdict)

    def _refuse_head(self, link: Link, verdict: Verdict) -> None:
        """Refuse a head that is below this member's minimum, at its arrival or later."""
        self._refused = link
        refusal = self._attestation.refusal(verdict)
        self._tell("refused", refusal.message)
        link.revoke(refusal.message)

    def _require_running(self) -> None:
        if self._stopping:
            raise LinkClosed("this member is shutting down")

    def _load(self, link: Link, plan: Plan) -> None:
        if plan.plan_id <= self._plan_id:
            raise StepError("the plan is not newer than the last one that came here")
        if self._newest.supersedes(plan.plan_id):
            raise StepError("a newer plan came before this one was looked at")
        self._plan_id = plan.plan_id
        self._preparing.stop()
        self._drop_plan()
        self._tell("loading", f"{plan.model}: {', '.join(name for s in plan.stages for name in s.holders)}")

        digest = plan_digest(plan)
        loaded = load_plan(
            plan,
            digest,
            me=self._me.name,
            hello=self._present_offer(),
            options=self._options,
            weights=self._weights,
            asker=Asker(plan, link, lambda: self._newest.check_load(plan, self._me.name)),
            before=self._take_kept(),
        )
        loaded.step_s, self._loaded = self.step_s, loaded
        self._attestation.evidence_maker.model = plan.manifest
        stage = loaded.stage
        ready = Ready(plan.plan_id, stage.weight_bytes, loaded.room_bytes, list(stage.block_bytes))
        link.send(ready, plan_id=plan.plan_id)
        layers = f"{loaded.assignment.start}-{loaded.assignment.end - 1}"
        verb = "stands by with" if self._options.standby else "holds"
        self._tell("ready", f"{verb} layers {layers}, {loaded.stage.weight_bytes / 1e6:.1f} MB of weights")

    def _activate(self, link: Link, activate: Activate, plan_id: int) -> None:
        loaded = self._loaded
        if loaded is None or activate.plan_digest != loaded.digest or plan_id != loaded.plan.plan_id:
            raise StepError("Activate names a plan that is not loaded here")
        if loaded.is_active:
            raise StepError("the plan is active already")
        if self._newest.supersedes(plan_id):
            raise StepError("a newer plan came before this one was active")
        self._dials.begin()
        if self._newest.supersedes(plan_id) or self._stopping or link.is_over:
            # The newer plan came before there was a dial to abandon, so `_handle_plan` had no effect.
            self._dials.abandon(SUPERSEDED)
        loaded.begin(activate, link, self._dials.reach, partial(could_not_leave, link, plan_id))
        link.send(Activated(plan_id), plan_id=plan_id)
        self._tell("active", " -> ".join("+".join(stage.holders) for stage in loaded.plan.stages))

    def _dial(self, name: str) -> Link:
        return self._network.dial(self._me, self._me.roster.member(name), self._options.successor_wait_s)

    def _begin_link(self, link: Link, allowed: frozenset[FrameType]) -> None:
        self._links.add(link)
        self.traffic.began(link)
        link.start(self.handlers.handle, self._ended, allowed)

    def _hidden(self, link: Link, received: ReceivedTensor) -> None:
        loaded = self._loaded
        if loaded is None or received.plan_id != loaded.plan.plan_id:
            # A frame of an ended plan: the head has given its sender up.
            return
        if loaded.follower is not None and loaded.is_led_by(link, received.plan_id):
            loaded.follower.accept_tensor(received)
            return
        if not loaded.is_active:
            return
        if received.kind is FrameType.BLOCKS:
            self._blocks(link, loaded, received)
            return
        if loaded.predecessor is None and link.peer == loaded.predecessor_name:
            loaded.predecessor = link
        if loaded.loop is None or link is not loaded.predecessor or received.kind is not FrameType.HIDDEN:
            link.dismiss("hidden states are for the predecessor in the ring to send")
            return
        loaded.loop.accept_hidden(link.peer, received)

    def _blocks(self, link: Link, loaded: LoadedPlan, received: ReceivedTensor) -> None:
        if link is not self._head or loaded.kv_server is None:
            link.dismiss("the K/V of sessions is for the plan's head to send")
            return
        loaded.kv_server.accept_tensor(received)

    def _failed(self, item: Received, error: ConvoyError) -> None:
        """Tell the head of an error in the form that it waits for.

        ``item`` came from it or from the predecessor.
        """
        if not self._stopping:
            self._limited_log.warning(
                type(error).__name__, f"a message could not be followed: {error.message}"
            )
        about = self._loaded.accused(error) if self._loaded is not None else ""
        answer: Refuse | StepFailed = StepFailed(item.step, error.message[:MAX_REASON], about)
        if isinstance(item, ReceivedMessage) and isinstance(item.message, Plan | Activate):
            is_old = isinstance(item.message, Plan) and self._loaded
            # A refused old plan must not end the newer one, which goes on.
            if not is_old:
                self._drop_plan()
            self._tell("refused", error.message)
            answer = refusal(item, self._me.name, error)
            if answer.memory_bytes is not None:
                # The next plan must not count on more, and no room for K/V either.
                self._left_bytes = min(self._left_bytes, answer.memory_bytes)
                answer = msgspec.structs.replace(answer, memory_bytes=self._present_offer().memory_bytes)
        # While this member stops, its links end in a moment. That tells the head more than a refusal.
        if self._head is None or self._stopping:
            return
        try:
            self._head.send(answer, plan_id=item.plan_id, step=item.step)
        except ConvoyError as lost:
            self._limited_log.warning("unsaid", f"the head could not be told: {lost.message}")

    def link_ended(self, link: Link, error: ConvoyError) -> None:
        self._links.discard(link)
        if link is self._head:
            self._head = None
            self._forget(HEAD_IS_GONE)
            self._tell_end(error, f"{link.peer} is gone")
            self._stopping = self._stopping or self._options.exit_with_head
        elif self._loaded is not None and self._loaded.is_neighbour(link):
            self._ring_broke(self._loaded.plan.plan_id, link.peer, error)

    def _ring_broke(self, plan_id: int, neighbour: str, error: ConvoyError) -> None:
        """End the plan and tell the head. The head's link stays open."""
        broken = f"the ring is broken at {neighbour}"
        self._drop_plan()
        self._tell_end(error, broken)
        if self._head is not None:
            failed = StepFailed(0, f"{broken}: {error.message}"[:MAX_REASON], neighbour)
            # If this send fails, the head's link ends too and is reported separately.
            with contextlib.suppress(ConvoyError):
                self._head.send(failed, plan_id=plan_id)

    def _tell_end(self, error: ConvoyError, lost: str) -> None:
        """Tell that a link ended with ``error``. It is ``lost`` unless its other end closed it in order.

        A neighbour in the ring also leaves because its head has ended, and its goodbye may come before the
        head's own.
        """
        if isinstance(error, PeerLeft):
            self._tell("ended", error.message)
        else:
            self._tell("lost", f"{lost}: {error.message}")

    def _forget(self, reason: str = PLAN_IS_OVER) -> None:
        """Drop the plan and the weights. ``reason`` is for the neighbours in the ring."""
        self._drop_plan(reason)
        self._kept = None

    def _drop_plan(self, reason: str = PLAN_IS_OVER) -> None:
        """Free the K/V and end the ring's links to both neighbours.

        The head's own link stays. So do the weights, because the head's next plan may need most of them.
        """
        loaded, self._loaded = self._loaded, None
        self._attestation.evidence_maker.model = ""
        if loaded is None:
            return
        loaded.close()
        self._kept = loaded.stage
        for link in loaded.neighbours():
            if link is not self._head:
                link.dismiss(reason)

    def _unload(self, why: str) -> None:
        self._preparing.stop()
        self._drop_plan()
        if (kept := self._take_kept()) is not None:
            kept.give_up()
        release_freed()
        self._tell("unloaded", why)

    def _take_kept(self) -> LoadedStage | None:
        kept, self._kept = self._kept, None
        return kept

    def _tell(self, kind: str, text: str) -> None:
        _log.info("%s: %s", kind, text)
        self._on_event(PeerEvent(kind, text))
