"""The head's side of a step over several members, in the order the data moves.

1. every peer gets the composition (`Step`) on the head's own link to it; only the owner of the embedding gets
token ids 2. a head that owns the first layers runs them and sends the hidden state to the next stage;
otherwise the first peer starts
3. the hidden state travels the ring and comes back to the head
4. a head that owns the last layers runs them, then the output; several steps may be between 1 and 3 at once
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from convoy.engine.executor import StepResult
from convoy.errors import ConvoyError, LinkBroken, LinkClosed, PeerError, StageLost, StepError
from convoy.model.stage import Stage
from convoy.model.tensors import from_wire, to_wire, tokens_from_bytes
from convoy.transport.inbox import Inbox, weight_of
from convoy.transport.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.wire.messages import StageAssignment, Step, StepFailed


def _not_its_turn(step: int) -> StepFailed:
    return StepFailed(step, "a hidden state came from a member that is not the last stage")


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """``depth`` steps may be in flight; a step that is not back after ``step_timeout_s`` ends the plan."""

    generation: int
    depth: int
    step_timeout_s: float = 60.0
    activation_dtype: str = "float32"


class PipelineExecutor:
    """Runs steps over the head's own stage (if it has layers) and its peers'.

    One thread submits and collects.
    """

    def __init__(
        self,
        stage: Stage,
        stages: Sequence[StageAssignment],
        head: str,
        links: dict[str, Link],
        options: PipelineOptions,
    ) -> None:
        self.depth = options.depth
        self._stage = stage
        self._stages = tuple(stages)
        self._links = links
        self._options = options
        self._head = head
        self._head_first = stages[0].member == head
        self._predecessor = stages[-1].member if self._head_first else stages[-2].member
        self._boundary = stages[-1].end if self._head_first else stages[-1].start
        self._in_flight: deque[Step] = deque()
        self._arrivals: Inbox[Received | ConvoyError] = Inbox()
        self._returned: dict[int, torch.Tensor] = {}

    def deliver(self, link: Link, received: Received) -> None:
        """Receiver threads of the head's links call this.

        A hidden state counts only from the last stage before the head: a readiness probe has to prove that
        every stage ran.
        """
        if isinstance(received, ReceivedTensor) and link.peer != self._predecessor:
            received = ReceivedMessage(received.generation, received.step, _not_its_turn(received.step))
        self._arrivals.put(link, received, weight_of(received))

    def lost(self, link: Link, error: ConvoyError) -> None:
        """A link ended."""
        lost = StageLost(
            f"the link to {link.peer} ended: {error.message}",
            hint="start that member again, then the head: `convoy serve`",
        )
        lost.__cause__ = error
        self._arrivals.put_last(link, lost)

    def submit(self, step: Step) -> None:
        bare = msgspec.structs.replace(step, tokens=b"")
        try:
            for assignment in self._stages:
                if assignment.member != self._head:
                    composition = step if assignment.embed else bare
                    self._links[assignment.member].send(
                        composition, generation=self._options.generation, step=step.number
                    )
            if self._head_first:
                self._start(step)
        except (LinkBroken, LinkClosed) as error:
            raise StageLost(f"a stage could not be reached: {error.message}") from error
        self._in_flight.append(step)

    def collect(self) -> StepResult:
        step = self._in_flight[0]
        hidden = self._await_return(step)
        self._in_flight.popleft()
        if not self._head_first:
            hidden = self._stage.select(step, self._stage.run(step, hidden=hidden, tokens=None))
        logits = self._stage.output(hidden)
        return StepResult(step.number, logits.numpy().astype(np.float32, copy=False))

    def close(self) -> None:
        self._arrivals.close(LinkClosed("the engine was closed"))

    def _start(self, step: Step) -> None:
        hidden = self._stage.run(step, hidden=None, tokens=tokens_from_bytes(step.tokens))
        first_peer = self._stages[1]
        self._links[first_peer.member].send_tensor(
            to_wire(hidden),
            generation=self._options.generation,
            step=step.number,
            boundary=first_peer.start,
        )

    def _await_return(self, step: Step) -> torch.Tensor:
        deadline = time.monotonic() + self._options.step_timeout_s
        while step.number not in self._returned:
            try:
                item = self._arrivals.get(max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise StageLost(
                    f"step {step.number} did not come back within {self._options.step_timeout_s:g} s",
                    hint="a stage hangs or its machine is overloaded: look at `convoy status`",
                ) from None
            self._sort(item)
        return self._returned.pop(step.number)

    def _sort(self, item: Received | ConvoyError) -> None:
        if isinstance(item, ConvoyError):
            raise item
        if item.generation != self._options.generation:
            return  # a member that was given up and woke
        if isinstance(item, ReceivedMessage):
            if isinstance(item.message, StepFailed):
                raise StageLost(f"a stage could not run step {item.message.number}: {item.message.reason}")
            return
        self._accept_hidden(item)

    def _accept_hidden(self, item: ReceivedTensor) -> None:
        step = next((s for s in self._in_flight if s.number == item.step), None)
        if step is None or item.boundary != self._boundary or item.step in self._returned:
            raise StageLost(f"a hidden state for step {item.step} at layer {item.boundary} was not expected")
        rows = step.rows
        expected = sum(r.num_outputs if self._head_first else r.num_tokens for r in rows)
        try:
            hidden = from_wire(
                item.tensor, hidden_size=self._stage.hidden_size, dtype=self._options.activation_dtype
            )
        except PeerError as error:
            raise StageLost(f"step {item.step} came back malformed: {error.message}") from error
        if hidden.shape[0] != expected:
            raise StageLost(
                f"step {item.step} came back with {hidden.shape[0]} rows, expected {expected}"
            ) from StepError("row count")
        self._returned[item.step] = hidden
