"""The engine: one visible loop, `schedule -> submit -> collect -> commit`, on one thread.

The engine knows neither HTTP nor the places of stages nor the transport of a step: an `Executor` does.
Callers submit from any thread. They get their outputs on the engine's thread, so a callback must not block.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from convoy.config.table import ENGINE
from convoy.engine.active import ActiveSequences, Between, PausedWork, RepeatedFailures
from convoy.engine.kv.prefix import PrefixTags
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output
from convoy.engine.requests.admission import check_request, check_tokens, fitted, room_for, unfit
from convoy.engine.requests.choice import Choice, make_choices
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.executor import Executor, NewStages, Recovery, Replan, StepResult
from convoy.engine.scheduler import Drafter, Scheduled, Scheduler, SchedulerLimits
from convoy.engine.sequence import SequenceOwner, SequenceState
from convoy.engine.stats import EngineProgress, EngineStats
from convoy.errors import ConvoyError, Draining, NotReady, StageLost, Unavailable
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Hold the options of an engine.

    An idle engine sends an empty step round the ring every ``probe_s`` seconds. It is ready while the last
    step is at most ``ready_s`` seconds old. With ``share_across_keys``, requests share the K/V of a common
    prefix whatever their salt: response times then tell one client which prompts another has sent.
    """

    max_context: int
    # How many rows each step of the warm-up has. Stages that capture decodes do so then, and not while
    # clients wait.
    first_rows: tuple[int, ...] = (1,)
    probe_s: float = 5.0
    ready_s: float = 15.0
    share_across_keys: bool = ENGINE.share_across_keys


class RequestHandle:
    """Hold a submitted request; `abort` ends it, from any thread, any number of times."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort

    def abort(self) -> None:
        self._abort()


_REQUEST = GenerationRequest((0,), SamplingParams(temperature=0.0), max_tokens=1, ignore_eos=True)


def warm_up(
    submit: Callable[[GenerationRequest, Callable[[Output], None]], object], num_rows: int = 1
) -> None:
    """Submit a one-token request with ``num_rows`` answers, and wait for their end.

    Raises the error that ended it.
    """
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    submit(replace(_REQUEST, num_choices=num_rows), outputs.put)
    while num_rows:
        output = outputs.get()
        if isinstance(output, ErrorOutput):
            raise output.error
        num_rows -= isinstance(output, FinishOutput)


__all__ = ["Engine", "EngineOptions", "EngineStats", "RequestHandle"]

_log = logging.getLogger(__name__)
_CLOSED = "the engine is closed"


@dataclass(frozen=True, slots=True)
class _InFlight:
    scheduled: Scheduled
    jobs: list[SampleJob]
    submitted_s: float


class Engine:
    """Run requests over an executor until `close`."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        limits: SchedulerLimits,
        options: EngineOptions,
        drafter: Drafter | None = None,
        *,
        recovery: Recovery | None = None,
    ) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._options = options
        self._recovery = recovery
        self._max_context = options.max_context
        self._tags = PrefixTags(limits.block_size)
        self._scheduler = Scheduler(limits, self._tags, drafter)
        self._scheduler.feeds = executor.feeds
        self._live = ActiveSequences(self._scheduler)
        self._in_flight: deque[_InFlight] = deque()
        self._between = PausedWork()
        self._changed = threading.Condition()
        self._closing = False
        self._failed: ConvoyError | None = None
        self._recovering = False
        # Pass an empty step now, instead of when the next probe is due.
        self._woken = False
        self._replan: Replan | None = None
        self._repeated_failures = RepeatedFailures()
        self._progress = EngineProgress()
        self._thread = threading.Thread(target=self._run, name="convoy-engine", daemon=True)

    @property
    def is_running(self) -> bool:
        """Return whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def has_paused_work(self) -> bool:
        """Return whether work waits for its turn between two steps."""
        return bool(self._between)

    @property
    def recovery(self) -> Recovery | None:
        """Return the source of new stages after a loss."""
        return self._recovery

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler. The engine's thread owns it; others may only look."""
        return self._scheduler

    # Called from any thread.

    @property
    def captures(self) -> bool:
        """Return whether the warm-up runs steps of several sizes, so that stages capture them."""
        return len(self._options.first_rows) > 1

    def start(self) -> None:
        """Start the loop and send real tokens through every stage.

        Raises `StageLost` if they do not come back.
        """
        self._thread.start()
        began_s = time.monotonic()
        for num_rows in self._options.first_rows:
            warm_up(self.submit, num_rows)
            if num_rows > 1:
                took_s = time.monotonic() - began_s
                _log.info("decodes of up to %d rows are ready, %.1f s after the first step", num_rows, took_s)
        # Under the lock: the loop may still be counting the warm-up token, which no client asked for.
        with self._changed:
            self._progress.warmed_up()
            self._scheduler.num_queried_tokens = self._scheduler.num_hit_tokens = 0

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> RequestHandle:
        """Queue a request and return its handle.

        Raises `RequestError`, `QueueFull`, `Draining` or `StageLost`. ``on_output`` is called on the engine's
        thread.
        """
        with self._changed:
            # Under the lock, because a recovery may shrink the room at any moment: a request that never fits
            # would be tried for ever.
            request = fitted(request, room_for(self._max_context, self._scheduler.pools))
            check_request(
                request,
                vocab_size=self._tokenizer.vocab_size,
                eos_ids=self._tokenizer.eos_ids,
                max_context=self._max_context,
                pools=self._scheduler.pools,
            )
            self._raise_if_over()
            choices = make_choices(
                *(request, self._tokenizer, on_output),
                share_across_keys=self._options.share_across_keys,
                counts=self._progress.requests,
            )
            self._scheduler.add([choice.sequence for choice in choices])
            self._live.add(choices)
            self._progress.prompt_tokens += len(request.prompt_ids)
            self._changed.notify()
        return RequestHandle(lambda: self.abort(choices))

    def abort(self, choices: list[Choice]) -> None:
        """End choices that still run; their blocks are free for the next step."""
        with self._changed:
            for choice in choices:
                if choice.sequence.state is not SequenceState.FINISHED:
                    self._live.retire(choice)
                    choice.finish("abort")
            self._changed.notify()

    def resume(self, owner: SequenceOwner, tokens: SequenceOf[int]) -> bool:
        """Run ``tokens`` after those of a resting sequence, or all tokens of a new one.

        Return False if the sequence lost its blocks: the caller then makes it anew. Raises as `submit` does;
        nothing runs then.
        """
        sequence = owner.sequence
        with self._changed:
            self._raise_if_over()
            if sequence.state is SequenceState.FINISHED:
                return False
            pools = self._scheduler.pools
            check_tokens(len(sequence.tokens) + len(tokens), max_context=self._max_context, pools=pools)
            if sequence.state is SequenceState.WAITING:
                self._scheduler.add([sequence])
            sequence.tokens.extend(tokens)
            self._live.add([owner])
            self._progress.session_tokens += sequence.num_pending
            self._changed.notify()
            return True

    def release(self, owner: SequenceOwner) -> None:
        """Drop a sequence without telling its owner; its blocks are free for the next step."""
        with self._changed:
            self._live.release(owner)
            self._changed.notify()

    def between_steps(self, work: Between, timeout_s: float | None = None) -> Any:
        """Run ``work`` on the engine's thread while no step is in flight, and return its result.

        It runs without the engine's lock, and must be short. Raises `Unavailable` if it has not begun within
        ``timeout_s``, for example during a recovery.
        """
        future = self.queue_between(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            with self._changed:
                dropped = self._between.drop(future)
        if dropped:
            text = f"no step ended within {timeout_s:g} s, so nothing could be done between two"
            raise Unavailable(text, public=text)
        # Work that has begun uses its caller's file, so the caller waits for its end.
        return future.result()

    def queue_between(self, work: Between) -> Future[Any]:
        """Queue ``work`` for `between_steps` without waiting for its turn; work itself may do so."""
        with self._changed:
            self._raise_if_over()
            future = self._between.add(work)
            self._changed.notify()
        return future

    @property
    def room(self) -> int:
        """Return how many tokens a request and its answer may have together. A recovery may change it."""
        with self._changed:
            return room_for(self._max_context, self._scheduler.pools)

    def check_ready(self) -> None:
        """Raise `NotReady` or `StageLost` unless a step passed every stage recently."""
        with self._changed:
            if self._failed is not None:
                raise _over(self._failed)
            if self._recovering and self._recovery is not None:
                text = f"recovering: {self._recovery.state()}"
                raise NotReady(text, public=text)
            self._progress.check_recent(self._options.ready_s)

    def stats(self) -> EngineStats:
        with self._changed:
            scheduler, progress = self._scheduler, self._progress
            return EngineStats(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                num_blocks=scheduler.pools.num_blocks,
                free_blocks=scheduler.pools.num_free,
                steps=progress.num_steps,
                prompt_tokens=progress.prompt_tokens,
                generated_tokens=progress.generated_tokens,
                session_tokens=progress.session_tokens,
                preempted=scheduler.num_preempted,
                cached_tokens=scheduler.num_cached_tokens,
                drafted_tokens=scheduler.num_drafted,
                accepted_tokens=scheduler.num_accepted,
                ring_s=progress.ring_s,
                recoveries=progress.recoveries,
                kv_usage=scheduler.pools.usage,
                queried_tokens=scheduler.num_queried_tokens,
                hit_tokens=scheduler.num_hit_tokens,
                requests=progress.requests.snapshot(),
                step_s=progress.step_s.snapshot(),
                near_ties=self._live.num_near_ties,
                lone_step_s=progress.lone_step_s,
            )

    def wake(self) -> None:
        """Pass an empty step now if idle, because a stage may have changed."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def renew(self, why: str) -> None:
        """Ask for other stages once nothing runs, because better ones may exist; ``why`` is the reason."""
        with self._changed:
            self._replan = Replan(why)
            self._changed.notify_all()

    def close(self, drain_s: float = 0.0, *, end_s: float = 10.0) -> None:
        """Take no more requests; those that still run after ``drain_s`` seconds end with an error.

        Wait ``end_s`` seconds for the end of the thread. A recovery that loads may hold it up for longer;
        see `is_running`.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._live, timeout=drain_s)
            if self._live and self._failed is None:
                self._fail(Draining("the server shut down before the answer was complete", public=_CLOSED))
            self._failed = self._failed or Draining(_CLOSED, public=_CLOSED)
            self._between.refuse(self._failed)
            self._changed.notify_all()
        if self._recovery is not None:
            self._recovery.cancel()
        self._executor.close()
        if self._thread.is_alive():
            self._thread.join(timeout=end_s)

    # The loop.

    def _run(self) -> None:
        try:
            while self._step():
                pass
            with self._changed:
                self._scheduler.check()
        except ConvoyError as error:
            with self._changed:
                if not self._closing:
                    _log.error("the engine stopped: %s", error.message)
                self._fail(error)
        except Exception:
            with self._changed:
                text = "the engine met an internal error"
                self._fail(StageLost(text, hint="the log has its traceback", public=text))
            _log.exception("the engine stopped")
            raise

    def _step(self) -> bool:
        """Run one turn of the loop; return False once the engine is closed."""
        try:
            # A late step leaves the ring full. Then nothing new may enter, and only that step is waited for.
            full = len(self._in_flight) >= self._executor.depth
            ready: _InFlight | Replan | None = None
            if self._between and not self._in_flight:
                # Paused work may read or change the K/V of every stage, so no step may be writing it.
                ready = self._between.do_one(self._executor, self._scheduler, self._changed)
            if ready is None and not full and not (self._between and self._in_flight):
                ready = self._schedule()
            if isinstance(ready, Replan):
                self._recover(ready)
                return True
            if ready is None and not self._in_flight:
                return bool(self._between)
            if ready is not None:
                self._submit(ready)
            # Collect only when the ring is full or there is nothing to run, so that several steps stay in
            # flight.
            if ready is None or len(self._in_flight) >= self._executor.depth:
                self._commit(self._executor.collect())
        except StageLost as error:
            if self._recovery is None:
                raise
            self._recover(error)
        return True

    def _recover(self, cause: StageLost | Replan) -> None:
        """Continue on other stages: running sequences wait again, and their known tokens run once more."""
        with self._changed:
            self._recovering = self._failed is None
        if not self._recovering:
            # All requests have failed already. Forget the steps, or the full ring would be asked for them for
            # ever.
            self._in_flight.clear()
            return
        try:
            recovered = self._ask(cause)
        finally:
            with self._changed:
                self._recovering = False
        if recovered is None:
            return
        with self._changed:
            self._executor, self._max_context = recovered.executor, recovered.max_context
            ran = [sequence for step in self._in_flight for sequence in step.scheduled.sequences]
            self._in_flight.clear()
            # `close` ran meanwhile and closed the old executor: close the new one too.
            if self._closing and self._failed is not None:
                self._executor.close()
                return
            self._failed = None
            # The new stages hold no K/V, so every sequence starts again from its known tokens.
            self._scheduler.reset(recovered.limits)
            self._scheduler.feeds = self._executor.feeds
            over = []
            if recovered.without_loss and not isinstance(cause, Replan):
                # No member was lost, so a request in flight may make the stages fail: end those that fail
                # again and again.
                over = self._repeated_failures.hopeless(self._live, ran, cause, recovered.failed_at)
            # The new stages may hold fewer tokens than some sequences have already.
            over += unfit(self._live.values(), room_for(self._max_context, self._scheduler.pools))
            for group, reason in over:
                self._live.end_group(group, reason)
            if recovered.without_loss:
                # Suspects run one at a time, so that the next failure tells which one causes it.
                self._scheduler.try_apart(
                    one for one in self._repeated_failures.suspects if one in self._live
                )
            if not recovered.same_bits:
                self._live.mark_replayed_inexact(recovered.near_tie)
            self._progress.recoveries += not isinstance(cause, Replan)
            self._progress.other_stages()
            self._woken = True

    def _ask(self, cause: StageLost | Replan) -> NewStages | None:
        """Ask for other stages until there are some; None if the present ones go on.

        If no stages are found in time, all requests fail and new ones are refused until stages are found.
        """
        recovery = self._recovery
        assert recovery is not None, "without a recovery no stage is replaced"
        while True:
            try:
                return recovery.replan(cause) if isinstance(cause, Replan) else recovery.recover(cause)
            except StageLost as gone:
                with self._changed:
                    if self._failed is None:
                        _log.error("nothing can run now: %s", gone.message)
                    self._fail(gone)
                cause = gone

    def _schedule(self) -> _InFlight | Replan | None:
        """Return the next step, or a request for other stages if nothing runs.

        Return None if there is only something to collect, or the engine is closed.
        """
        with self._changed:
            while self._failed is None:
                scheduled = self._scheduler.schedule()
                if scheduled is not None:
                    return self._ready(scheduled)
                if self._in_flight or (self._between and not self._woken):
                    return None
                if self._closing and not self._live:
                    return None
                # Idle: a cheap check of the blocks that changed since the last one.
                self._scheduler.check_changed()
                if self._replan is not None:
                    replan, self._replan = self._replan, None
                    return replan
                if self._woken or not self._changed.wait(timeout=self._options.probe_s):
                    self._woken = False
                    # The check visits the whole pool, so it runs with each probe and not after every token of
                    # a session.
                    self._scheduler.check()
                    return self._ready(self._scheduler.probe())
            self._in_flight.clear()
            return None

    def _ready(self, scheduled: Scheduled) -> _InFlight:
        return _InFlight(scheduled, self._live.sample_jobs(scheduled), time.monotonic())

    def _submit(self, ready: _InFlight) -> None:
        self._in_flight.append(ready)
        self._executor.submit(ready.scheduled.step, ready.jobs)

    def _commit(self, result: StepResult) -> None:
        done = self._in_flight.popleft()
        scheduled = done.scheduled
        # Stages run steps in order, so the oldest step in flight is the one that came back.
        assert scheduled.step.number == result.number, "steps came back out of order"
        with self._changed:
            self._scheduler.collected(scheduled)
            rows = scheduled.step.rows
            self._progress.passed(
                done.submitted_s, num_sequences=len(rows), num_tokens=sum(row.num_tokens for row in rows)
            )
            if (chunk_s := self._scheduler.limits.chunk_s) is not None:
                self._scheduler.chunk_beside_decodes = self._progress.tokens_in(chunk_s)
            self._progress.generated_tokens += self._live.advance(scheduled, result.outcomes)
            self._changed.notify_all()

    def _fail(self, error: ConvoyError) -> None:
        """End every request with ``error``; the caller holds the lock."""
        self._failed = error
        self._live.end_all(error)
        self._between.refuse(error)
        self._changed.notify_all()

    def _raise_if_over(self) -> None:
        if self._failed is not None:
            raise _over(self._failed)
        if self._closing:
            raise Draining("the server is shutting down", hint="send the request to another server")


def _over(failed: ConvoyError) -> StageLost:
    return StageLost(failed.message, hint=failed.hint, public=failed.public)
