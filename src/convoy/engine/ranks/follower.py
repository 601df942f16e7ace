"""A follower rank: it runs the orders of rank 0, in order and each to its end, and nothing else.

An accepted order runs even if the plan ends meanwhile, because rank 0 may wait for this rank's part of it.
The end of a plan also ends its collective, so that no rank waits for ever.
"""

from __future__ import annotations

import time

import torch

from convoy.engine.ranks.rank_collective import RankCollective, prove
from convoy.engine.run.kv_server import KvServer
from convoy.engine.stats import Histogram
from convoy.errors import HiddenError, StepError
from convoy.model.stage import Stage
from convoy.model.tensors import from_wire, tokens_from_bytes
from convoy.transport.link.link import Link, ReceivedTensor
from convoy.wire.messages.control import FrameType, ReadBlocks, Step, WriteBlocks
from convoy.wire.messages.ranks import RankOutput, RankStep

Order = RankStep | RankOutput | ReadBlocks | WriteBlocks


class FollowerLoop:
    """Run the orders for one rank under one plan id, on one thread.

    A hidden state comes right behind the order that announces it, on the same link. Anything else in its
    place is an error.
    """

    def __init__(
        self, stage: Stage, collective: RankCollective, plan_id: int, step_s: Histogram | None = None
    ) -> None:
        """Prepare the loop.

        ``step_s`` records each step's time in seconds, with the waits for other ranks included.
        """
        self._step_s = step_s
        # The last step that ran; read from other threads.
        self.finished_step = -1
        self._stage = stage
        self._collective = collective
        self._plan_id = plan_id
        self._keeper: KvServer | None = None
        # An order that waits for its hidden state.
        self._waiting: RankStep | RankOutput | None = None
        self._last: tuple[Step, torch.Tensor] | None = None

    def accept(self, leader: Link, order: Order, plan_id: int) -> None:
        """Run an order of rank 0, or keep it until its hidden state comes; an order of an old plan is
        dropped.

        Raises `StepError` for an invalid order, and any error of running it.
        """
        if plan_id != self._plan_id:
            return
        if self._waiting is not None:
            raise StepError(f"a {type(order).__name__} came in place of a hidden state")
        match order:
            case ReadBlocks() | WriteBlocks():
                self._keeper = self._keeper or KvServer(self._stage, leader, plan_id)
                self._keeper.accept(order, plan_id)
            case RankStep() | RankOutput() if order.hidden:
                self._waiting = order
            case RankStep():
                self._run(order, None)
            case RankOutput():
                self._run_output(order, self._own_rows(order))

    def accept_tensor(self, received: ReceivedTensor) -> None:
        """Take a hidden state, or K/V of a session. Raises as `accept` does."""
        if received.plan_id != self._plan_id:
            return
        if received.kind is FrameType.BLOCKS:
            if self._keeper is not None:
                self._keeper.accept_tensor(received)
            return
        order, self._waiting = self._waiting, None
        if order is None:
            raise HiddenError(f"a hidden state came for step {received.step}, and no order before it")
        number = order.step.number if isinstance(order, RankStep) else order.number
        start = self._stage.assignment.start
        if (received.step, received.boundary) != (number, start):
            raise HiddenError(
                f"a hidden state came for step {received.step} and layer {received.boundary}, expected "
                f"{number} and {start}"
            )
        dtype = "bfloat16" if received.tensor.dtype == "bfloat16" else "float32"
        hidden = from_wire(received.tensor, hidden_size=self._stage.hidden_size, dtype=dtype)
        if isinstance(order, RankStep):
            self._run(order, hidden)
        elif hidden.shape[0] != order.num_rows:
            raise HiddenError(f"{hidden.shape[0]} rows for the output came, expected {order.num_rows}")
        else:
            self._run_output(order, hidden)

    def _run(self, order: RankStep, hidden: torch.Tensor | None) -> None:
        step, began_s = order.step, time.monotonic()
        if step.number <= self.finished_step:
            raise StepError(f"step {step.number} came after step {self.finished_step}")
        tokens = tokens_from_bytes(step.tokens) if self._stage.takes_tokens else None
        out = self._stage.run(step, hidden, tokens)
        if not step.rows:
            # A step without rows is a probe: it must show that every rank computes.
            prove(self._collective)
        self._last = (step, out)
        if order.output:
            rows = self._stage.select(step, out)
            self._run_output(RankOutput(step.number, rows.shape[0], hidden=False), rows)
        self._collective.rest()
        if step.rows and self._step_s is not None:
            self._step_s.observe(time.monotonic() - began_s)
        self.finished_step = step.number

    def _own_rows(self, order: RankOutput) -> torch.Tensor:
        if self._last is None or self._last[0].number != order.number:
            raise StepError(f"the output of step {order.number} is asked for, which did not run last")
        step, out = self._last
        rows = self._stage.select(step, out)
        if rows.shape[0] != order.num_rows:
            raise StepError(
                f"step {order.number} has {rows.shape[0]} outputs, and {order.num_rows} are asked for"
            )
        return rows

    def _run_output(self, order: RankOutput, rows: torch.Tensor) -> None:
        if order.num_rows:
            self._stage.output(rows)
            self._collective.rest()
