"""Bring-up on the head: reach the peers, agree on a plan, load, activate, and hand an executor to the engine.

1. dial every peer of the roster and say `Hello`
2. place the layers over what the members offer
3. send `Plan`; every member loads its own stage at the same time
4. take the smallest block count that fits everywhere and send `Activate`
5. steps may flow
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from convoy.cluster.mailbox import Mailbox
from convoy.cluster.offer import agree_kernel, check_dtype, make_hello
from convoy.cluster.options import HeadOptions
from convoy.cluster.status import StageStatus
from convoy.cluster.vetting import Vetting
from convoy.engine.executor import Executor
from convoy.engine.local import LocalExecutor
from convoy.engine.pipeline import PipelineExecutor, PipelineOptions
from convoy.errors import ConvoyError, LinkClosed, PeerError, PeerUnreachable, PlanError
from convoy.model.source import ModelSource
from convoy.model.stage import Stage, StageOptions
from convoy.plan.placement import MemberOffer, Placement, place
from convoy.transport.link import Link, Received
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.transport.network import Network, TcpNetwork
from convoy.wire.codec import encode_message
from convoy.wire.messages import Activate, Activated, FrameType, Hello, Plan, Ready, StageAssignment

LoadProgress = Callable[[str, int, int], None]  # member, loaded bytes, total bytes

FROM_PEER = frozenset(
    {
        FrameType.HELLO,
        FrameType.PROGRESS,
        FrameType.READY,
        FrameType.REFUSE,
        FrameType.ACTIVATED,
        FrameType.HIDDEN,
        FrameType.STEP_FAILED,
        FrameType.DRAWN,
        FrameType.CHALLENGE,
        FrameType.EVIDENCE,
    }
)
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Granted:
    """What the plan came to, once every member has loaded."""

    plan: Plan
    placement: Placement
    weight_bytes: dict[str, int]
    num_blocks: int
    max_context: int


def plan_digest(plan: Plan) -> bytes:
    """SHA-256 of the plan's encoding: what `Activate` names."""
    return hashlib.sha256(encode_message(plan)).digest()


class Head:
    """The head's side of a running cluster: its links, its stage, the plan and the executor over all."""

    def __init__(
        self,
        me: Membership,
        source: ModelSource,
        options: HeadOptions,
        network: Network | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """``watch`` is called while waiting for peers; what it raises ends the bring-up.

        Raises `ConfigError` for options that make no sense.
        """
        options.check()
        self._watch = watch or (lambda: None)
        self._gone = False
        self._me = me
        self._network = network or TcpNetwork()
        self._source = source
        self._options = options
        self._mailbox = Mailbox(watch)
        self._pipeline: PipelineExecutor | None = None
        self.vetting = Vetting(lambda: self._me.current, options.member)
        self._closed = False
        self.links: dict[str, Link] = {}
        self.executor: Executor | None = None
        self.granted: Granted | None = None

    def bring_up(self, on_load: LoadProgress | None = None) -> Granted:
        """Everything up to the first step.

        Raises `PeerError`, `PlanError` or `ModelError`; the links are closed then.
        """
        try:
            hellos = self._meet_peers()
            plan, placement = self._make_plan(hellos)
            stage, readies = self._load(plan, on_load)
            self.granted = self._activate(plan, placement, hellos, stage, readies)
            self.executor = self._make_executor(plan, stage)
            self.vetting.watch(self.links, plan)
            return self.granted
        except BaseException:
            self.close("the head could not bring the cluster up")
            raise

    def stages(self) -> list[StageStatus]:
        """The picture of the cluster now, with a fresh round trip to each peer."""
        assert self.granted is not None, "stages() before bring_up()"
        return [self._stage_status(assignment) for assignment in self.granted.plan.stages]

    def sealed_bytes(self) -> int:
        """All that the head sent and received in sealed frames."""
        return sum(link.sent_sealed_bytes + link.received_sealed_bytes for link in self.links.values())

    def close(self, reason: str = "the head is shutting down") -> None:
        """Say goodbye on every link. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._mailbox.close()
        self.vetting.attestation.close()
        if self.executor is not None:
            self.executor.close()
        for link in self.links.values():
            link.close(reason)

    # 1. dial and greet

    def _meet_peers(self) -> dict[str, Hello]:
        hello = make_hello(self._options.member)
        peers = [member for member in self._me.roster.members if member.name != self._me.name]
        self._dial_all(peers)
        for link in self.links.values():
            self.vetting.attestation.attach(link)
            link.start(self._deliver, self._lost, FROM_PEER)
            link.send(hello)
        answers = self._mailbox.gather(self.links, Hello, self._options.wait_s)
        self.vetting.admit(self.links, self._watch)
        return {self._me.name: hello, **{name: answers[name] for name in self.links}}

    def _dial_all(self, peers: list[Member]) -> None:
        # At once, because each absent one takes the whole wait; the first that fails ends it for all.
        reached: queue.SimpleQueue[Link | BaseException | None] = queue.SimpleQueue()

        def reach(member: Member) -> None:
            try:
                reached.put(self._dial_until(member))
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                reached.put(error)

        for member in peers:
            threading.Thread(target=reach, args=(member,), name=f"dial {member.name}", daemon=True).start()
        for _ in peers:
            link = reached.get()
            if isinstance(link, BaseException):
                self._gone = True
                raise link
            if link is not None:
                self.links[link.peer] = link

    def _dial_until(self, member: Member) -> Link | None:
        """None once the roster lists it no more."""
        deadline = time.monotonic() + self._options.wait_s
        while True:
            self._watch()
            if all(listed.name != member.name for listed in self._me.roster.members):
                return None
            try:
                remaining = max(_RETRY_S, deadline - time.monotonic())
                link = self._network.dial(self._me, member, min(5.0, remaining))
                if self._gone:
                    link.close("the head gave up on another member")
                return link
            except PeerUnreachable as error:
                if time.monotonic() >= deadline or self._gone:
                    host, port = member.address
                    raise PeerUnreachable(
                        f"{member.name} at {host}:{port} did not answer within {self._options.wait_s:g} s",
                        hint=f"run `convoy join` on {member.name}, mend its address in the roster, "
                        f"or take it out: `convoy roster remove {member.name}`",
                    ) from error
                time.sleep(_RETRY_S)

    # 2. plan

    def _make_plan(self, hellos: dict[str, Hello]) -> tuple[Plan, Placement]:
        kernel = agree_kernel(hellos, self._me.name)
        dtype = check_dtype(hellos, self._me.name)
        offers = [
            MemberOffer(
                name, hello.memory_bytes, name == self._me.name, self.vetting.level(name), hello.num_threads
            )
            for name, hello in sorted(hellos.items(), key=lambda item: self._rank(item[0]))
        ]
        rules = self._options.member.policy.placement
        with self.vetting.explain():
            placement = place(self._source.spec, offers, self._options.spans, rules)
        plan = Plan(
            generation=time.time_ns(),  # grows over restarts: frames of an earlier head are told apart
            model=self._source.name,
            model_digest=self._source.digest,
            stages=list(placement.stages),
            kernel=kernel,
            activation_dtype=dtype,
            block_size=self._options.block_size,
            max_context=self._max_context(),
        )
        return plan, placement

    def _rank(self, name: str) -> int:
        """The head first, then the others as the roster lists them."""
        names = [member.name for member in self._me.roster.members]
        if name == self._me.name:
            return -1
        return names.index(name) if name in names else len(names)  # taken out a moment ago

    def _max_context(self) -> int:
        context = self._source.spec.max_context
        return min(context, self._options.max_context) if self._options.max_context else context

    # 3. load

    def _load(self, plan: Plan, on_load: LoadProgress | None) -> tuple[Stage, dict[str, Ready]]:
        holders = [link for name, link in self.links.items() if any(s.member == name for s in plan.stages)]
        for link in holders:
            link.send(plan, generation=plan.generation)
        mine = next(stage for stage in plan.stages if stage.member == self._me.name)
        progress = None if on_load is None else (lambda done, total: on_load(self._me.name, done, total))
        options = StageOptions(
            kernel=plan.kernel, block_size=plan.block_size, num_threads=self._options.member.num_threads
        )
        stage = Stage.load(self._source, mine, options, progress)
        readies = self._mailbox.gather(
            [link.peer for link in holders],
            Ready,
            self._options.load_wait_s,
            None if on_load is None else (lambda peer, p: on_load(peer, p.loaded_bytes, p.total_bytes)),
        )
        return stage, readies

    # 4. activate

    def _activate(
        self,
        plan: Plan,
        placement: Placement,
        hellos: dict[str, Hello],
        stage: Stage,
        readies: dict[str, Ready],
    ) -> Granted:
        room = hellos[self._me.name].memory_bytes - stage.weight_bytes
        fits = {self._me.name: room // stage.block_bytes} | {n: r.max_blocks for n, r in readies.items()}
        num_blocks = self._choose_blocks(fits, plan)
        stage.make_pools(num_blocks)
        for name in readies:
            self.links[name].send(
                Activate(plan.generation, plan_digest(plan), num_blocks), generation=plan.generation
            )
        self._mailbox.gather(readies, Activated, self._options.wait_s)
        weights = {self._me.name: stage.weight_bytes} | {n: r.weight_bytes for n, r in readies.items()}
        return Granted(plan, placement, weights, num_blocks, plan.max_context)

    def _choose_blocks(self, fits: dict[str, int], plan: Plan) -> int:
        tightest = min(fits, key=lambda name: fits[name])
        per_context = -(-plan.max_context // plan.block_size)
        wanted = self._options.num_blocks or self._options.max_batch * per_context
        least = self._options.num_blocks or 1
        if fits[tightest] < least:
            raise PlanError(
                f"{tightest} has memory for {max(0, fits[tightest])} K/V blocks beside its weights, "
                f"and at least {least} are needed",
                hint="give that member fewer layers or more memory",
            )
        return min(wanted, fits[tightest])

    # 5. run

    def _make_executor(self, plan: Plan, stage: Stage) -> Executor:
        if len(plan.stages) == 1:
            return LocalExecutor(stage)
        options = PipelineOptions(
            generation=plan.generation,
            depth=self._options.depth(len(plan.stages)),
            step_timeout_s=self._options.step_timeout_s,
            activation_dtype=plan.activation_dtype,
        )
        self._pipeline = PipelineExecutor(stage, plan.stages, self._me.name, self.links, options)
        self._mailbox.close()
        return self._pipeline

    def _deliver(self, link: Link, received: Received) -> None:
        if self.vetting.attestation.takes(link, received):
            return
        (self._pipeline or self._mailbox).deliver(link, received)

    def _lost(self, link: Link, error: ConvoyError) -> None:
        told = self.vetting.lost(link, error)
        if told is not None and self._needs(link):
            (self._pipeline or self._mailbox).lost(link, told)

    def _needs(self, link: Link) -> bool:
        """Before a plan runs everybody is needed; then those that hold a stage."""
        if self._pipeline is None or self.granted is None:
            return True
        return any(stage.member == link.peer for stage in self.granted.plan.stages)

    def _address(self, name: str) -> str:
        """Empty for a member that a newer roster took out: its stage is lost, and shown until a new plan."""
        found = [member.address for member in self._me.roster.members if member.name == name]
        return "{}:{}".format(*found[0]) if found else ""

    def _stage_status(self, assignment: StageAssignment) -> StageStatus:
        assert self.granted is not None
        name = assignment.member
        link = self.links.get(name)
        return StageStatus(
            member=name,
            level=self.vetting.level(name).text,
            start=assignment.start,
            end=assignment.end,
            embed=assignment.embed,
            output=assignment.output,
            weight_bytes=self.granted.weight_bytes[name],
            sees_token_ids=name in self.granted.placement.route.token_id_members,
            address=self._address(name),
            round_trip_s=None if link is None else _round_trip(link),
            cipher=None if link is None else link.cipher,
            link_id=None if link is None or link.is_over else link.link_id.hex(),
            sealed_bytes_sent=0 if link is None else link.sent_sealed_bytes,
            sealed_bytes_received=0 if link is None else link.received_sealed_bytes,
        )


def _round_trip(link: Link) -> float | None:
    try:
        return link.ping(timeout_s=1.0)
    except (PeerError, LinkClosed):
        return None  # shown as unknown: the engine is the one that reports a lost stage
