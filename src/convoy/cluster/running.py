"""A head with its engine, for the server, the command line and the tests to run requests on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.head.head import Head, LoadProgress
from convoy.cluster.offer import other_bits
from convoy.cluster.options import HeadOptions
from convoy.cluster.presence.first_dial import Arrival
from convoy.cluster.recovery.rebalance import Rebalancer
from convoy.cluster.recovery.recovery import StageRecovery
from convoy.cluster.status import ClusterStatus, ParallelStatus
from convoy.cluster.weights.head_weights import HeadWeights
from convoy.config.kernels import CAPTURED_ROWS, CUDA_KERNELS, KERNELS, STEADY, kv_form
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.scheduler import SchedulerLimits
from convoy.engine.sessions.format import SessionModel
from convoy.engine.sessions.session import Session
from convoy.errors import ConvoyError, Unavailable
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from convoy.transport.membership import Membership
from convoy.transport.network import Network
from convoy.trust.evidence.level import weakest
from convoy.wire.messages.control import Plan, Progress

_log = logging.getLogger(__name__)


class RunningCluster:
    """Run a cluster between `start` and `close`. In that time `engine` takes requests.

    Between `unload` and `load` it runs no model: ``engine`` is then closed, and ``asleep`` says why.
    """

    def __init__(
        self,
        head: Head,
        active: ActivePlan,
        tokenizer: Tokenizer,
        source: ModelSource,
        options: HeadOptions,
    ) -> None:
        self.head = head
        self._options = options
        self.asleep = ""
        # No model is loaded, because the last load failed.
        self.has_failed = False
        # The status before `unload`, until `load` ends.
        self._last: ClusterStatus | None = None
        self._take(active, tokenizer, source)

    def _take(self, active: ActivePlan, tokenizer: Tokenizer, source: ModelSource) -> None:
        """Make the engine of a plan, and all else that knows its model."""
        options = self._options
        self._num_guesses = options.num_guesses(source.spec, steady=active.plan.kernel in STEADY)
        if self._num_guesses < options.speculate:
            why = options.why_no_guesses(source.spec, active.plan.kernel)
            _log.info("no token is guessed ahead: %s", why)
        self.engine = _engine_over(self.head, active, tokenizer, options)
        self.source, self.tokenizer = source, tokenizer

    @classmethod
    def start(
        cls,
        me: Membership,
        source: ModelSource,
        options: HeadOptions,
        on_load: LoadProgress | None = None,
        *,
        network: Network | None = None,
        watch: Callable[[], None] | None = None,
        on_arrival: Arrival | None = None,
        on_start: Callable[[str, Progress], None] | None = None,
        own: HeadWeights | None = None,
    ) -> RunningCluster:
        """Bring the cluster up and pass one real token through every stage.

        ``on_arrival`` is told of each peer that answers, of the missing ones, and of the seconds left for
        them. ``on_start`` is told each second of a peer that has answered and still starts. ``own``: see
        `Head`. Raises the errors of `Head.bring_up`.
        """
        tokenizer = Tokenizer(source)
        head = Head(me, source, options, network, watch, own=own)
        if on_arrival is not None:
            head.peers.on_arrival = on_arrival
        if on_start is not None:
            head.peers.on_start = on_start
        active = head.bring_up(on_load)
        running = cls(head, active, tokenizer, source, options)
        try:
            running._start_engine()
        except BaseException:
            running.close()
            raise
        return running

    def unload(self, why: str) -> None:
        """End the plan and free its weights and K/V on every member. No request may run.

        ``why`` is what `health` says until `load` ends. Raises `Unavailable` if the engine's thread does not
        end within ``load_wait_s``; then nothing is freed, and a later call tries again.
        """
        last = self._last or self.status()
        self.has_failed = False
        self.asleep, self._last = (
            why,
            msgspec.structs.replace(
                last, route="", stages=[], standbys=[], running=0, waiting=0, step_path=None, ring_s=None
            ),
        )
        self._end_engine()
        self.head.unload(why)

    def _start_engine(self) -> None:
        self.engine.start()
        if self.engine.captures:
            self.head.clock.forget()

    def _end_engine(self) -> None:
        """Close the engine and wait for its thread, because a recovery on it may still load stages."""
        wait_s = self._options.load_wait_s
        self.engine.close(end_s=wait_s)
        if self.engine.is_running:
            text = f"the engine did not end within {wait_s:g} s, so its model is not unloaded"
            raise Unavailable(text, public=text, hint="try again: the next load waits for its end once more")

    def load(
        self,
        source: ModelSource,
        tokenizer: Tokenizer,
        *,
        own: HeadWeights | None = None,
        on_load: LoadProgress | None = None,
    ) -> None:
        """Run a model after `unload`: another one, or the same again.

        The caller closes the ``tokenizer`` of a model that is not loaded any more. Raises as `start` does;
        then no model is loaded.
        """
        active = self.head.load(source, own, on_load)
        self._take(active, tokenizer, source)
        try:
            self._start_engine()
        except BaseException:
            self._end_engine()
            self.head.unload("the model could not be loaded")
            raise
        self.asleep, self._last = "", None

    def session(
        self,
        params: SamplingParams | None = None,
        *,
        salt: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Session:
        """Return a timeline of tokens for the caller alone; see `engine.sessions.session.Session`.

        ``params`` are its default sampling parameters; None is greedy.
        """
        active = self.head.active_plan
        assert active is not None
        spec = self.source.spec
        group = spec.cache_groups[0]
        model = SessionModel(
            name=active.plan.model,
            digest=active.plan.model_digest,
            kernel=active.plan.kernel,
            num_layers=spec.num_layers,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            vocab_size=spec.vocab_size,
            max_context=active.max_context,
            manifest=self.head.manifest,
            kv_dtype=kv_dtype_of(active.plan),
            keeps_kv=len(spec.cache_groups) == 1 and group.is_full and group.is_carried,
        )
        return Session(self.engine, model, params=params, salt=salt, timeout_s=timeout_s)

    def health(self) -> tuple[bool, str]:
        """Return whether a token passed every stage lately, and a reason that any client may read.

        Without a model it is ready too, unless a load failed: a request that comes now loads its model.
        """
        if self.asleep:
            return not self.has_failed, self.asleep
        try:
            self.engine.check_ready()
        except ConvoyError as error:
            return False, error.public or "a stage was lost"
        return True, "a token passes every stage"

    def level(self) -> str:
        """Return the cluster's evidence level: that of its weakest member."""
        return weakest(verdict.level for verdict in self.head.verifier.in_use()).text

    def status(self, *, foresees: bool = False, measures: bool = True) -> ClusterStatus:
        """Return the whole picture now.

        With ``measures``, pings every peer: tens of microseconds each, a second for one that hangs. Without,
        the last round trips count. With ``foresees``, another
        thread computes the forecast once for each plan and its offers, and later calls return it.
        """
        last = self._last
        if last is not None:
            return self._status_asleep(last)
        return self._status(foresees=foresees, measures=measures)

    def _status_asleep(self, last: ClusterStatus) -> ClusterStatus:
        """Return the last status, without the parts that only a plan has."""
        peers, roster = self.head.peers, self.head.roster
        return msgspec.structs.replace(
            last,
            ready=not self.has_failed,
            reason=self.asleep,
            absent=peers.absent_status(),
            idle=peers.idle.report(self.head.hellos(), {self.head.name}),
            verdicts=self.head.verifier.report(),
            roster_epoch=roster.epoch,
            roster_expires_unix_s=roster.expires.timestamp(),
            versions={name: hello.software for name, hello in self.head.hellos().items()},
        )

    def _status(self, *, foresees: bool, measures: bool) -> ClusterStatus:
        active = self.head.active_plan
        assert active is not None
        ready, reason = self.health()
        stats, roster = self.engine.stats(), self.head.roster
        return ClusterStatus(
            model=active.plan.model,
            ready=ready,
            reason=reason,
            route=self.head.route().describe(),
            kernel=active.plan.kernel,
            generation=active.plan.plan_id,
            stages=self.head.stages(measures=measures),
            running=stats.running,
            waiting=stats.waiting,
            num_blocks=stats.num_blocks,
            free_blocks=stats.free_blocks,
            steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            session_tokens=stats.session_tokens,
            ring_s=stats.ring_s,
            recoveries=stats.recoveries,
            near_ties=stats.near_ties,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            guesses=self._num_guesses,
            why_kernel=self.head.peers.why_kernel,
            kv_dtype=kv_dtype_of(active.plan),
            other_bits=other_bits(self.head.hellos(), self.head.name, active.plan.kernel),
            level=self.level(),
            minimum_level=self.head.verifier.attestation.policy.minimum.text,
            verdicts=self.head.verifier.report(),
            standbys=self.head.standbys(),
            parallel=ParallelStatus(active.placement.mode, active.placement.reason),
            absent=self.head.peers.absent_status(),
            idle=self.head.peers.idle.report(self.head.hellos(), active.members),
            cluster=roster.cluster_id,
            roster_epoch=roster.epoch,
            roster_expires_unix_s=roster.expires.timestamp(),
            queried_tokens=stats.queried_tokens,
            hit_tokens=stats.hit_tokens,
            max_context=active.max_context,
            versions={name: hello.software for name, hello in self.head.hellos().items()},
            step_path=self.head.step_path(),
            lone_step_s=stats.lone_step_s,
            forecast=self.head.forecast(is_idle=not stats.running) if foresees else None,
        )

    def close(self, drain_s: float = 0.0) -> None:
        """Stop the engine, then say goodbye to the peers."""
        self.engine.close(drain_s)
        self.head.close()
        self.tokenizer.close()


def _engine_over(head: Head, active: ActivePlan, tokenizer: Tokenizer, options: HeadOptions) -> Engine:
    """Return an engine that asks the head for other stages, and hears from it of losses and arrivals."""
    spec = active.placement.spec

    def limits_of(active: ActivePlan) -> SchedulerLimits:
        return options.for_kernels(active.kernels).limits(
            spec,
            num_stages=active.num_places,
            num_blocks=active.num_blocks,
            block_size=active.plan.block_size,
        )

    def joined(name: str) -> None:
        head.preload()
        renewals.joined(name)

    assert head.executor is not None
    limits = limits_of(active)
    recovery = StageRecovery(head, options.recover_wait_s, options.load_wait_s, limits_of)
    engine = Engine(
        head.executor,
        tokenizer,
        limits,
        EngineOptions(
            active.max_context, _first_rows(active, limits), share_across_keys=options.share_across_keys
        ),
        options.drafter(spec, steady=active.plan.kernel in STEADY),
        recovery=recovery,
    )
    head.peers.on_gone = recovery.lost
    renewals = Rebalancer(
        *(head.peers, recovery, engine.renew, engine.between_steps, head.preparations.joined),
        options=options.rebalance,
    )
    recovery.on_plan = renewals.plan_began
    head.seek(engine.wake, joined)
    # A member may have come while the first plan was loaded.
    renewals.plan_began(())
    return engine


def _first_rows(active: ActivePlan, limits: SchedulerLimits) -> tuple[int, ...]:
    """Return how many rows each step of the warm-up has: as many as each decode that devices capture."""
    if not all(kernel in CUDA_KERNELS for kernel in active.kernels):
        return (1,)
    return limits.decode_rows(CAPTURED_ROWS)


def kv_dtype_of(plan: Plan) -> str:
    """Return the dtype of K/V on all stages of ``plan``, or the setting if they run several kernels."""
    return kv_form(plan.kernel, plan.kv_dtype).name if plan.kernel in KERNELS else plan.kv_dtype
