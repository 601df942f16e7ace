"""A peer's life once a plan is active: take the step, take the hidden state, run, send on.

Compositions come from the head's link, hidden states from the predecessor's; the first one waits for the
other. Steps run in the order of their numbers, which is the order in which the head sent them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from convoy.engine.run.sampling import jobs_of, replies_of
from convoy.errors import ConvoyError, HiddenError, StepError
from convoy.model.stage import PendingSamples, Stage
from convoy.model.tensors import from_wire, to_wire, tokens_from_bytes
from convoy.transport.link.link import Link, ReceivedTensor
from convoy.wire.messages.control import MAX_IN_FLIGHT, MAX_MARKED_STEPS, StageAssignment, StageMarks, Step

Failed = Callable[[int, ConvoyError], None]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepMarks:
    """Hold the monotonic times of one step at one stage.

    The stage that starts a step has its ``arrived_s`` when the step was submitted, and its ``began_s`` once
    all peers know the step. The last two are the head's alone: when the step came back, and when its turn
    came.
    """

    number: int
    arrived_s: float
    began_s: float
    computed_s: float = 0.0
    sent_s: float = 0.0
    returned_s: float = 0.0
    taken_s: float = 0.0
    ended_s: float = 0.0


class StepLog:
    """Keep the marks of the last steps that ended here. One thread adds, and any thread reads."""

    def __init__(self) -> None:
        self._ended: deque[StepMarks] = deque(maxlen=MAX_MARKED_STEPS)

    def add(self, marks: StepMarks) -> None:
        """Keep a step that has left this stage for good."""
        self._ended.append(marks)

    def ended(self) -> tuple[StepMarks, ...]:
        """Return the marks of the last steps, the oldest first."""
        return tuple(self._ended.copy())

    def answer(self) -> list[StageMarks]:
        """Return the marks as a peer sends them: in microseconds before now."""
        now_s = time.monotonic()

        def ago(at_s: float) -> int:
            return max(0, round((now_s - at_s) * 1e6))

        return [
            StageMarks(one.number, ago(one.arrived_s), ago(one.began_s), ago(one.computed_s), ago(one.sent_s))
            for one in self.ended()
        ]


def marks_of(marks: Sequence[StageMarks], at_s: float) -> list[StepMarks]:
    """Return the marks that a peer sent, as times of this machine's clock. The peer sent them at ``at_s``."""
    return [
        StepMarks(
            one.number,
            at_s - one.arrived_us / 1e6,
            at_s - one.began_us / 1e6,
            at_s - one.computed_us / 1e6,
            at_s - one.sent_us / 1e6,
        )
        for one in marks
    ]


@dataclass(frozen=True, slots=True)
class StageRoute:
    """Hold a stage's place in the ring of one plan id."""

    plan_id: int
    assignment: StageAssignment
    # None if this stage owns the embedding and starts each step.
    predecessor: str | None
    # Whether the next stop is the owner of the output, which takes selected rows only.
    last: bool
    activation_dtype: str
    # Steps known but not yet run; a head never has more in flight.
    max_steps: int = MAX_IN_FLIGHT
    # Of waiting hidden states, and of waiting compositions, separately.
    max_waiting_bytes: int = 256 * 1024 * 1024
    # Whether the stage computes on a device while this process continues.
    overlaps: bool = False


class StageWorker:
    """Run the steps at one peer in their order. Called from one thread."""

    def __init__(
        self,
        stage: Stage,
        route: StageRoute,
        successor: Link,
        failed: Failed = lambda _step, _error: None,
        observe_s: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """Prepare the worker.

        ``failed`` is called, on another thread, with a step that could not be sent from a device.
        ``observe_s`` is called with the time of each step here, from having all its inputs to being sent.
        """
        self._stage = stage
        self._route = route
        self._observe_s = observe_s
        self.successor = successor
        self._steps: deque[Step] = deque()
        self._hidden: dict[int, torch.Tensor] = {}
        self._hidden_bytes = 0
        self._steps_bytes = 0
        self._next_step = 0
        # Of each step that is known or runs here: when its last input came, and its marks from then on.
        self._arrived_s: dict[int, float] = {}
        self._marks: dict[int, StepMarks] = {}
        self.log = StepLog()
        # The last step that ran and was sent on; read from other threads.
        self.finished_step = -1
        self._hand_over = DeviceSender(f"leave {route.assignment.member}", failed) if route.overlaps else None

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes of steps and hidden states that wait here for each other."""
        return self._hidden_bytes + self._steps_bytes

    def close(self) -> None:
        """Stop sending, because the plan is over."""
        if self._hand_over is not None:
            self._hand_over.close()

    def accept_step(self, step: Step, plan_id: int) -> None:
        """Take a composition from the head; one of an old plan is dropped. Raises `StepError`."""
        if plan_id != self._route.plan_id:
            return
        if len(self._steps) >= self._route.max_steps:
            raise StepError(f"{len(self._steps)} steps wait here, and at most {self._route.max_steps} may")
        if step.number < self._next_step + len(self._steps):
            raise StepError(f"step {step.number} came after step {self._next_step + len(self._steps) - 1}")
        weight = step.weight()
        if self._steps and self._steps_bytes + weight > self._route.max_waiting_bytes:
            raise StepError(f"{len(self._steps)} steps wait here, and another would take too much memory")
        self._steps.append(step)
        self._arrived_s[step.number] = max(time.monotonic(), self._arrived_s.get(step.number, 0.0))
        self._steps_bytes += weight
        self._run_ready()
        if self._steps:
            # It waits for a hidden state, and those ahead of it were prepared when they came.
            self._stage.prepare(step)

    def accept_hidden(self, sender: str, received: ReceivedTensor) -> None:
        """Take a hidden state from the predecessor. Raises `HiddenError` if it fits no step."""
        if received.plan_id != self._route.plan_id:
            return
        if sender != self._route.predecessor:
            raise HiddenError(
                f"a hidden state came from {sender}, but this stage follows "
                f"{self._route.predecessor or 'no member'}"
            )
        if received.step < self._next_step:
            raise HiddenError(f"a hidden state came for step {received.step}, which has run already")
        start = self._route.assignment.start
        if received.boundary != start:
            raise HiddenError(
                f"a hidden state for layer {received.boundary} came to a stage that starts at {start}"
            )
        if received.step in self._hidden or len(self._hidden) >= self._route.max_steps:
            raise HiddenError(f"a hidden state for step {received.step} came twice, or too many wait")
        waiting = self._hidden_bytes + received.tensor.nbytes
        if self._hidden and waiting > self._route.max_waiting_bytes:
            raise HiddenError(
                f"{waiting} bytes of hidden states would wait here, and at most "
                f"{self._route.max_waiting_bytes} may"
            )
        try:
            hidden = from_wire(
                received.tensor, hidden_size=self._stage.hidden_size, dtype=self._route.activation_dtype
            )
        except StepError as error:
            raise HiddenError(error.message) from error
        self._hidden[received.step] = hidden
        self._arrived_s[received.step] = received.at_s or time.monotonic()
        self._hidden_bytes += hidden.nbytes
        self._run_ready()

    def _run_ready(self) -> None:
        while self._steps:
            step = self._steps[0]
            if self._route.predecessor is not None and step.number not in self._hidden:
                return
            self._steps.popleft()
            self._steps_bytes -= step.weight()
            self._next_step = step.number + 1
            hidden = self._hidden.pop(step.number, None)
            self._hidden_bytes -= 0 if hidden is None else hidden.nbytes
            # Beside a hidden state, token ids come only for layers that need them. Such layers get none for
            # an empty step.
            ids = hidden is None or step.tokens or not step.rows
            tokens = tokens_from_bytes(step.tokens) if ids else None
            began_s = time.monotonic()
            arrived_s = self._arrived_s.pop(step.number, began_s)
            self._marks[step.number] = StepMarks(step.number, arrived_s, began_s)
            if self._hand_over is None:
                self._run(step, hidden, tokens)
            else:
                self._start(self._hand_over, step, hidden, tokens)

    def _run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> None:
        out = self._stage.run(step, hidden=hidden, tokens=tokens)
        if self._route.assignment.output:
            jobs = jobs_of(step, self._stage.vocab_size)
            self._send_samples(step, self._stage.sample(self._stage.select(step, out), jobs))
            return
        self._send(step, self._stage.select(step, out) if self._route.last else out)

    def _start(
        self, leaves: DeviceSender, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None
    ) -> None:
        """Run a step as `_run` does, but wait for the device on another thread."""
        if self._route.assignment.output:
            out = self._stage.start(step, hidden, tokens, selects=True).wait()
            samples = self._stage.sample(out, jobs_of(step, self._stage.vocab_size))
            leaves.put(step.number, lambda: self._send_samples(step, samples))
        else:
            pending = self._stage.start(step, hidden, tokens, selects=self._route.last)
            leaves.put(step.number, lambda: self._send(step, pending.wait()))

    def _send(self, step: Step, out: torch.Tensor) -> None:
        self._marks[step.number].computed_s = time.monotonic()
        self.successor.send_tensor(
            to_wire(out, self._route.activation_dtype),
            plan_id=self._route.plan_id,
            step=step.number,
            boundary=self._route.assignment.end,
        )
        self._finished(step)

    def _send_samples(self, step: Step, samples: PendingSamples) -> None:
        replies = replies_of(step, samples.outcomes())
        self._marks[step.number].computed_s = time.monotonic()
        self.successor.send(replies, plan_id=self._route.plan_id, step=step.number)
        self._finished(step)

    def _finished(self, step: Step) -> None:
        marks = self._marks.pop(step.number)
        marks.sent_s = time.monotonic()
        if step.rows:
            self._observe_s(marks.sent_s - marks.began_s)
            self.log.add(marks)
        self.finished_step = step.number


class DeviceSender:
    """Wait for a device's results, seal and send them on a thread of its own, while the next step starts.

    Steps are sent in the order in which they were put. A stage on the host gains nothing from it: there, the
    thread that runs steps computes them itself.

    ``failed`` is called, on this thread, with the first step that could not be sent; nothing is sent after
    it.
    """

    def __init__(self, name: str, failed: Failed) -> None:
        self._failed = failed
        self._waiting: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._over = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, step: int, leave: Callable[[], None]) -> None:
        """Queue ``leave``, which waits for the step's result and sends it.

        Never blocks: steps in flight are bounded.
        """
        self._waiting.put((step, leave))

    def close(self) -> None:
        """Drop the steps that were not sent; the thread ends as soon as its link lets it."""
        self._over = True
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._over:
                continue
            step, leave = item
            try:
                leave()
            except ConvoyError as error:
                self._fail(step, error)
            except Exception as error:  # noqa: BLE001 - logged whole, and told
                # The driver raises errors of many types, and the waiting side must hear of each.
                _log.exception("a step could not leave")
                self._fail(step, StepError(f"internal error: {type(error).__name__}"))

    def _fail(self, step: int, error: ConvoyError) -> None:
        if not self._over:
            self._over = True
            self._failed(step, error)
