"""The order of steps at one peer: what came once runs once; what does not fit is refused before it runs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from convoy.engine.run.stage_worker import StageRoute, StageWorker
from convoy.errors import HiddenError, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.transport.link.link import Link, ReceivedTensor
from convoy.wire.messages.control import StageAssignment, Step
from convoy.wire.tensor import WireTensor

WIDTH = 8
ROUTE = StageRoute(
    3,
    StageAssignment("beta", 2, 4, False, False),
    predecessor="alpha",
    last=False,
    activation_dtype="float32",
)


class CountingStage:
    """Remember which steps ran."""

    hidden_size = WIDTH

    def __init__(self) -> None:
        self.ran: list[int] = []

    def prepare(self, step: Step) -> None:
        """Do nothing ahead."""

    def run(self, step: Step, hidden: torch.Tensor, tokens: Any) -> torch.Tensor:
        self.ran.append(step.number)
        return hidden


class Successor:
    def __init__(self) -> None:
        self.got: list[int] = []

    def send_tensor(self, _tensor: WireTensor, *, plan_id: int, step: int, boundary: int) -> None:
        self.got.append(step)


def loop() -> tuple[StageWorker, CountingStage, Successor]:
    stage, successor = CountingStage(), Successor()
    return StageWorker(cast(HostStage, stage), ROUTE, cast(Link, successor)), stage, successor


def step(number: int) -> Step:
    return Step(number, [], [], [], b"")


def hidden(number: int, width: int = WIDTH) -> ReceivedTensor:
    return ReceivedTensor(3, number, 2, WireTensor("float32", (1, width), bytes(4 * width)))


def test_a_step_that_ran_never_runs_again() -> None:
    steps, stage, successor = loop()
    for number in (0, 1):
        steps.accept_step(step(number), 3)
        steps.accept_hidden("alpha", hidden(number))
    with pytest.raises(StepError, match="step 1 came after step 1"):
        steps.accept_step(step(1), 3)
    with pytest.raises(HiddenError, match="step 1, which has run already"):
        steps.accept_hidden("alpha", hidden(1))
    assert stage.ran == successor.got == [0, 1]


def test_a_hidden_state_of_another_width_is_refused_before_the_step_runs() -> None:
    steps, stage, _ = loop()
    steps.accept_step(step(0), 3)
    with pytest.raises(HiddenError, match=r"expected \[tokens, 8\]"):
        steps.accept_hidden("alpha", hidden(0, width=4))
    assert stage.ran == []


def test_frames_of_a_plan_that_was_given_up_change_nothing() -> None:
    steps, stage, _ = loop()
    steps.accept_step(step(0), 2)
    steps.accept_hidden("alpha", ReceivedTensor(2, 0, 2, hidden(0).tensor))
    assert stage.ran == []
    steps.accept_step(step(0), 3)
    steps.accept_hidden("alpha", hidden(0))
    assert stage.ran == [0]
