"""Compositions and hidden states that wait at a stage are bounded, in any order of arrival."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from convoy.engine.run.stage_worker import StageRoute, StageWorker
from convoy.errors import StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.tensors import to_wire
from convoy.transport.link.link import Link, ReceivedTensor
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step
from convoy.wire.tensor import WireTensor

HIDDEN_SIZE = 8
ROW_BYTES = 4 * HIDDEN_SIZE


class EchoStage:
    """Return its input."""

    hidden_size = HIDDEN_SIZE

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.prepared: list[int] = []

    def prepare(self, step: Step) -> None:
        self.prepared.append(step.number)

    def run(self, step: Step, *, hidden: torch.Tensor, tokens: object) -> torch.Tensor:
        self.ran.append(step.number)
        return hidden


class Sink:
    """Stand for a successor that takes everything."""

    def send_tensor(self, tensor: WireTensor, *, plan_id: int, step: int, boundary: int) -> None:
        pass


def make_loop(max_waiting_bytes: int) -> tuple[StageWorker, EchoStage]:
    stage = EchoStage()
    route = StageRoute(
        plan_id=1,
        assignment=StageAssignment("beta", 2, 4, False, False),
        predecessor="alpha",
        last=False,
        activation_dtype="float32",
        max_waiting_bytes=max_waiting_bytes,
    )
    return StageWorker(cast(HostStage, stage), route, cast(Link, Sink())), stage


def hidden(step: int, num_rows: int) -> ReceivedTensor:
    return ReceivedTensor(1, step, 2, to_wire(torch.zeros(num_rows, HIDDEN_SIZE)))


def composition(number: int, num_tokens: int = 1, num_blocks: int = 0) -> Step:
    return Step(number, [], [BlockGrant.append(1, 0, [0] * num_blocks)], [Row(1, 0, num_tokens, 1)], b"")


def test_hidden_states_that_wait_for_their_step_are_bounded_by_bytes() -> None:
    loop, stage = make_loop(10 * ROW_BYTES)
    loop.accept_hidden("alpha", hidden(1, 4))
    loop.accept_hidden("alpha", hidden(2, 4))
    with pytest.raises(StepError, match=f"{12 * ROW_BYTES} bytes of hidden states would wait here"):
        loop.accept_hidden("alpha", hidden(3, 4))
    for number in (1, 2, 3):
        loop.accept_step(composition(number, 4), 1)
    loop.accept_hidden("alpha", hidden(3, 4))  # what ran made room
    assert stage.ran == [1, 2, 3]
    # Its hidden state alone came later than the step.
    assert stage.prepared == [3]
    assert loop.waiting_bytes == 0


def test_one_hidden_state_may_be_larger_than_all_that_may_wait() -> None:
    loop, stage = make_loop(ROW_BYTES)
    loop.accept_hidden("alpha", hidden(1, 100))
    loop.accept_step(composition(1, 100), 1)
    assert stage.ran == [1]


def test_compositions_that_wait_for_their_hidden_state_are_bounded_by_what_they_weigh() -> None:
    loop, stage = make_loop(100_000)
    loop.accept_step(composition(1, num_blocks=2000), 1)
    with pytest.raises(StepError, match="1 steps wait here, and another would take too much memory"):
        loop.accept_step(composition(2, num_blocks=2000), 1)
    loop.accept_hidden("alpha", hidden(1, 1))
    loop.accept_step(composition(2, num_blocks=2000), 1)
    loop.accept_hidden("alpha", hidden(2, 1))
    assert stage.ran == [1, 2]
