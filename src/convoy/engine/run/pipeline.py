"""The head's side of a step over several members, in the order the data moves.

1. Every peer gets the composition (`Step`) on the head's own link; only the embedding's owner gets token ids.
2. A head that owns the first layers runs them and sends the hidden state on; otherwise the first peer starts.
3. The hidden state travels round the ring and comes back to the owner of the output.
4. A head that owns the output runs its own last layers, if any, then the output, and samples.
5. A last peer that owns the output does so instead, as the step's sampling jobs say, and sends the sampled
   tokens.

Several steps may be between 1 and 3 at once.

A fed step, whose tokens are samples of a step ahead, passes 1 at once. It waits for 2 until those samples
start, and goes on before the engine has them: a token's own way round the ring is all that the next one waits
for.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from convoy.config.table import ENGINE, MODEL
from convoy.engine.kv.limits import STEP_TIMEOUT_S
from convoy.engine.run.deadline import StepClock
from convoy.engine.run.executor import Kv, StepResult
from convoy.engine.run.feeding import FedTokens, StepSamples, StepStarter
from convoy.engine.run.kv_client import KvClient
from convoy.engine.run.own_stage import own_stage
from convoy.engine.run.sampling import outcome_of, request_of
from convoy.engine.run.send_guard import SendGuard
from convoy.engine.run.stage_worker import DeviceSender, StepLog, StepMarks
from convoy.errors import ConvoyError, LinkBroken, LinkClosed, PeerError, StageLost, StepError, StepLate
from convoy.model.sampling.output_rows import SampleJob, SampleResult, SampleTask
from convoy.model.stage import PendingSamples, Stage
from convoy.model.tensors import from_wire, to_wire, tokens_from_bytes
from convoy.transport.link.inbox import Inbox, weight_of
from convoy.transport.link.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.wire.messages.control import (
    MAX_IN_FLIGHT,
    FrameType,
    SampleReplies,
    StageAssignment,
    Step,
    StepFailed,
)

_LEAST_ARRIVED_BYTES = 32 * 1024 * 1024
# The size of a reply with all its alternatives.
_ROW_BYTES = 16 * 1024


def _not_its_turn(step: int) -> StepFailed:
    return StepFailed(step, "the end of a step came from a member that is not the last stage")


@dataclass(slots=True, eq=False)
class _Running:
    step: Step
    jobs: Sequence[SampleJob]
    marks: StepMarks
    fed: FedTokens
    samples: StepSamples


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Hold the options of a `PipelineExecutor`.

    ``depth`` steps of ``max_step_tokens`` may be in flight. A step may take ``step_timeout_s`` until times
    have been measured.
    """

    plan_id: int
    depth: int
    step_timeout_s: float = STEP_TIMEOUT_S
    activation_dtype: str = MODEL.activation_dtype
    max_step_tokens: int = ENGINE.max_step_tokens
    # Whether the head's stage computes on a device while this process continues.
    overlaps: bool = False
    # Whether steps may be fed, if the head starts them. Each of ``depth`` steps may then have one behind it.
    feeds: bool = False


class PipelineExecutor:
    """Run steps over the head's own stage (if it has layers) and those of its peers.

    One thread submits and collects.
    """

    def __init__(
        self,
        stage: Stage,
        stages: Sequence[StageAssignment],
        head: str,
        links: dict[str, Link],
        options: PipelineOptions,
        *,
        clock: StepClock | None = None,
        log: StepLog | None = None,
    ) -> None:
        self.log = log or StepLog()
        self.clock = clock or StepClock(options.step_timeout_s)
        self._stage = stage
        self._stages = tuple(stages)
        self._links = links
        self._options = options
        self._head = head
        self._head_first = stages[0].member == head
        self._predecessor = stages[-1].member if self._head_first else stages[-2].member
        self._boundary = stages[-1].end if self._head_first else stages[-1].start
        self._owner = next(stage.member for stage in stages if stage.output)
        # Token ids of a fed step are not known when peers learn of it.
        peers_take_ids = any(one.member != head and self._takes_ids(one) for one in stages)
        self.feeds = options.feeds and self._head_first and not peers_take_ids
        self.depth = min(2 * options.depth, MAX_IN_FLIGHT) if self.feeds else options.depth
        self._starter = StepStarter(stage)
        self._in_flight: deque[_Running] = deque()
        # Those of them that the head has not started yet.
        self._queued: deque[_Running] = deque()
        self._arrivals: Inbox[Received | ConvoyError] = Inbox(max_bytes=self._max_arrived_bytes())
        self._returned: dict[int, torch.Tensor | SampleReplies] = {}
        # When each of them came, by the receiver's thread.
        self._returned_s: dict[int, float] = {}
        # The members that failed first, or sent invalid data; two if it may have been either.
        self.suspects: tuple[str, ...] = ()
        self._guard = SendGuard(self.clock.allowed_s)
        self._leaving_guard = SendGuard(self.clock.allowed_s) if options.overlaps else self._guard
        self._leaves = DeviceSender(f"leave {head}", self._could_not_leave) if options.overlaps else None
        self._carrier = KvClient(
            stage,
            self._stages,
            head,
            links,
            plan_id=options.plan_id,
            timeout_s=options.step_timeout_s,
            guard=self._guard,
        )

    def _max_arrived_bytes(self) -> int:
        # The inbox must hold all steps in flight. While this thread sends, it does not read, and a last stage
        # that waits for the inbox would hold up the stage that is sent to.
        step_bytes = self._options.max_step_tokens * (4 * self._stage.hidden_size + _ROW_BYTES)
        return max(_LEAST_ARRIVED_BYTES, 2 * self.depth * step_bytes)

    def deliver(self, link: Link, received: Received) -> None:
        """Queue a message or a tensor; receiver threads of the head's links call this.

        A hidden state counts only from the last stage before the head, because a readiness probe must prove
        that every stage ran.
        """
        if self._carrier.expects(link, received):
            self._carrier.handle_answer(link, received)
            return
        is_end = isinstance(received, ReceivedTensor) or isinstance(received.message, SampleReplies)
        is_stray = isinstance(received, ReceivedTensor) and received.kind is not FrameType.HIDDEN
        # A peer that skips stages would make the probe pass without them, so its tensor becomes a failure.
        if is_end and (is_stray or link.peer != self._predecessor):
            received = ReceivedMessage(received.plan_id, received.step, _not_its_turn(received.step))
        is_now = received.plan_id == self._options.plan_id
        if isinstance(received, ReceivedMessage) and isinstance(received.message, StepFailed) and is_now:
            self._suspect(link.peer, received.message.about)
        self._carrier.note(received)
        self._arrivals.put(link, received, weight_of(received))

    def lost(self, link: Link, error: ConvoyError) -> None:
        """End all waits, because a link ended."""
        lost = StageLost(
            f"the link to {link.peer} ended: {error.message}",
            hint="start that member again",
            public=f"the link to {link.peer} ended",
        )
        lost.__cause__ = error
        self._arrivals.put_last(link, lost)
        self._carrier.end(lost)

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        self._sample_arrived()
        now_s = time.monotonic()
        with self._sending(step):
            fed = FedTokens.of(step, (ahead.samples for ahead in reversed(self._in_flight)))
        marks = StepMarks(step.number, now_s, now_s)
        running = _Running(step, jobs, marks, fed, StepSamples.of(step))
        waits = self._head_first and (bool(self._queued) or not fed.may_start)
        self._in_flight.append(running)
        if not waits:
            self.clock.sent(step)
        with self._sending(step):
            self._announce(step, jobs)
        marks.began_s = marks.computed_s = marks.sent_s = time.monotonic()
        if waits:
            with self._sending(step):
                self._stage.prepare(step)
            self._queued.append(running)
        elif self._head_first:
            self._start(running)

    def collect(self) -> StepResult:
        running = self._in_flight[0]
        self._await_return(running.step)
        running.marks.taken_s = time.monotonic()
        running.marks.returned_s = self._returned_s.pop(running.step.number, running.marks.taken_s)
        # The next steps start now, before this one's samples have come from a device.
        self._sample_arrived()
        self._in_flight.popleft()
        self.clock.returned()
        with own_stage(running.step.number, self._suspect_head):
            result = StepResult(running.step.number, self._samples_of(running).outcomes())
        del self._returned[running.step.number]
        running.marks.ended_s = time.monotonic()
        if running.step.rows:
            self.log.add(running.marks)
        return result

    def _samples_of(self, running: _Running) -> PendingSamples:
        """Return the samples of a step that came back, after the head's own part of it."""
        if running.samples.pending is None:
            running.samples.pending = self._sample(running, self._returned[running.step.number])
        return running.samples.pending

    def _sample(self, running: _Running, returned: torch.Tensor | SampleReplies) -> PendingSamples:
        if isinstance(returned, SampleReplies):
            return SampleTask(self._read(returned, running))
        if not self._head_first:
            takes_ids = self._takes_ids(self._stage.assignment)
            tokens = tokens_from_bytes(running.step.tokens) if takes_ids else None
            hidden = self._stage.run(running.step, hidden=returned, tokens=tokens)
            returned = self._stage.select(running.step, hidden)
        return self._stage.sample(returned, running.jobs)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        return self._carrier.read(start, end, blocks)

    def write_blocks(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        self._carrier.write(start, blocks, tags, kv)

    @property
    def oldest(self) -> int | None:
        """Return the number of the step that `collect` waits for, or None."""
        return self._in_flight[0].step.number if self._in_flight else None

    def close(self) -> None:
        self._guard.close()
        self._leaving_guard.close()
        if self._leaves is not None:
            self._leaves.close()
        closed = LinkClosed("the engine was closed")
        self._arrivals.close(closed)
        self._carrier.end(closed)

    def _suspect_head(self) -> None:
        self._suspect(self._head)

    def _suspect(self, member: str, accused: str = "") -> None:
        """Record the first failure, reported by ``member``, as the fault of one or two members.

        ``accused``, the member that the report accuses, may be at fault as well as the reporter. It counts
        only if it is the reporter's neighbour in the ring or another rank of its stage. The head knows that
        it is not at fault itself. The accused comes first.
        """
        if self.suspects:
            return
        ring = [stage.member for stage in self._stages]
        places = [at for at, name in enumerate(ring) if name == member]
        neighbours = {ring[(at + by) % len(ring)] for at in places for by in (-1, 1)}
        neighbours.update(name for stage in self._stages if member in stage.holders for name in stage.holders)
        doubted = accused in neighbours - {self._head, member}
        self.suspects = (accused, member) if doubted else (member,)

    def _announce(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        for assignment in self._stages:
            if assignment.member != self._head:
                link = self._links[assignment.member]
                part = self._part_of(step, jobs, assignment)
                self._guard.begin(link)
                link.send(part, plan_id=self._options.plan_id, step=step.number)
        self._guard.end()

    def _part_of(self, step: Step, jobs: Sequence[SampleJob], assignment: StageAssignment) -> Step:
        """Return the step for one stage.

        It has token ids only for the embedding and layers that need them, and sampling jobs only for the
        owner of the output.
        """
        return msgspec.structs.replace(
            step,
            tokens=step.tokens if self._takes_ids(assignment) else b"",
            samples=[request_of(job) for job in jobs] if assignment.output else [],
        )

    def _takes_ids(self, assignment: StageAssignment) -> bool:
        own = range(assignment.start, assignment.end)
        return assignment.embed or not self._stage.token_id_layers.isdisjoint(own)

    def _start(self, running: _Running) -> None:
        """Run the head's layers, and send their result on."""
        step, marks = running.step, running.marks
        with self._sending(step):
            pending = self._starter.start(step, running.fed)
            # The samples of a device hold its memory.
            running.fed = FedTokens()
            if self._leaves is None:
                self._send_hidden(step, pending.wait(), marks, self._guard)
            else:
                self._leaves.put(step.number, lambda: self._send_waited(step, pending.wait(), marks))

    def _sample_arrived(self) -> None:
        """Start sampling for all steps that are back, and the steps that waited for those samples alone.

        A device then works while the next step is scheduled. A host that feeds no steps samples one when it
        is collected.
        """
        here = self._options.overlaps and self._head_first and self._owner == self._head
        if not (here or self.feeds):
            return
        with contextlib.suppress(queue.Empty):
            while True:
                self._sort(self._arrivals.get(0.0))
        for running in self._in_flight:
            if running.step.number in self._returned:
                with own_stage(running.step.number, self._suspect_head):
                    self._samples_of(running)
            self._start_queued()

    def _start_queued(self) -> None:
        while self._queued and self._queued[0].fed.may_start:
            running = self._queued.popleft()
            self.clock.sent(running.step)
            marks = running.marks
            marks.arrived_s = marks.began_s = marks.computed_s = marks.sent_s = time.monotonic()
            self._start(running)

    @contextlib.contextmanager
    def _sending(self, step: Step) -> Iterator[None]:
        """Do the head's work for ``step``, which may send. Raises `StageLost`."""
        try:
            with own_stage(step.number, self._suspect_head):
                yield
        except (LinkBroken, LinkClosed) as error:
            public = "a stage could not be reached"
            raise StageLost(f"{public}: {error.message}", public=public) from error
        finally:
            self._guard.end()

    def _send_waited(self, step: Step, hidden: torch.Tensor, marks: StepMarks) -> None:
        """Send the hidden state on, on the thread that waited for the device."""
        try:
            self._send_hidden(step, hidden, marks, self._leaving_guard)
        finally:
            self._leaving_guard.end()

    def _send_hidden(self, step: Step, hidden: torch.Tensor, marks: StepMarks, guard: SendGuard) -> None:
        marks.computed_s = time.monotonic()
        first_peer = self._stages[1]
        link = self._links[first_peer.member]
        guard.begin(link)
        link.send_tensor(
            to_wire(hidden, self._options.activation_dtype),
            plan_id=self._options.plan_id,
            step=step.number,
            boundary=first_peer.start,
        )
        marks.sent_s = time.monotonic()

    def _could_not_leave(self, step: int, error: ConvoyError) -> None:
        """Report a step that could not be sent, on the sending thread.

        Links that end report that themselves; any other error is the head's own fault.
        """
        if isinstance(error, LinkBroken | LinkClosed):
            return
        self._suspect_head()
        public = "the head could not run a step"
        text = f"the head could not run step {step}: {error.message}"
        self._arrivals.put_last(self, StageLost(text, hint=error.hint, public=public))

    def _await_return(self, step: Step) -> None:
        self._sample_arrived()
        while step.number not in self._returned:
            due_s = self.clock.due_s()
            try:
                item = self._arrivals.get(max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                text = f"step {step.number} did not come back within {self.clock.allowed_s():.3g} s"
                raise StepLate(
                    text,
                    public=text,
                    hint="a stage hangs or its machine is overloaded: look at `convoy status`",
                ) from None
            self._sort(item)

    def _sort(self, item: Received | ConvoyError) -> None:
        if isinstance(item, ConvoyError):
            raise item
        if item.plan_id != self._options.plan_id:
            # A member that woke after it was given up: its frames belong to an old plan.
            return
        if isinstance(item, ReceivedMessage):
            if isinstance(item.message, StepFailed):
                raise StageLost(self._what_failed(item.message), public=self._who_failed())
            if isinstance(item.message, SampleReplies):
                self._expect(item.message.number, self._owner != self._head)
                self._returned[item.message.number] = item.message
                self._returned_s[item.message.number] = time.monotonic()
            return
        self._accept_hidden(item)

    def _what_failed(self, said: StepFailed) -> str:
        if any(one.step.number == said.number for one in self._in_flight):
            return f"a stage could not run step {said.number}: {said.reason}"
        # The stage failed while it had no step.
        return f"a stage cannot go on: {said.reason}"

    def _who_failed(self) -> str:
        if len(self.suspects) > 1:
            return f"a step failed between {' and '.join(self.suspects)}"
        return f"{self.suspects[0]} could not run a step"

    def _expect(self, number: int, expected: bool) -> Step:
        """Return the step in flight that this end belongs to. Raises `StageLost` if there is none."""
        step = next((one.step for one in self._in_flight if one.step.number == number), None)
        if step is None or not expected or number in self._returned:
            raise self._malformed(f"the end of step {number} was not expected")
        return step

    def _read(self, replies: SampleReplies, running: _Running) -> tuple[SampleResult, ...]:
        if len(replies.answers) != len(running.jobs):
            found, expected = len(replies.answers), len(running.jobs)
            raise self._malformed(
                f"step {replies.number} came back with {found} samples, expected {expected}"
            )
        try:
            pairs = zip(replies.answers, running.jobs, strict=True)
            sizes = (self._stage.vocab_size, self._stage.output_size)
            return tuple(outcome_of(answer, job, *sizes) for answer, job in pairs)
        except PeerError as error:
            raise self._malformed(f"step {replies.number} came back malformed: {error.message}") from error

    def _accept_hidden(self, item: ReceivedTensor) -> None:
        at_boundary = item.boundary == self._boundary and self._owner == self._head
        rows = self._expect(item.step, at_boundary).rows
        expected = sum(r.num_outputs if self._head_first else r.num_tokens for r in rows)
        try:
            hidden = from_wire(
                item.tensor, hidden_size=self._stage.hidden_size, dtype=self._options.activation_dtype
            )
        except PeerError as error:
            raise self._malformed(f"step {item.step} came back malformed: {error.message}") from error
        if hidden.shape[0] != expected:
            raise self._malformed(
                f"step {item.step} came back with {hidden.shape[0]} rows, expected {expected}"
            ) from StepError("row count")
        self._returned[item.step] = hidden
        self._returned_s[item.step] = item.at_s or time.monotonic()

    def _malformed(self, text: str) -> StageLost:
        self._suspect(self._predecessor)
        return StageLost(text, public=f"{self._predecessor} sent an invalid end of a step")
