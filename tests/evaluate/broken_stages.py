"""Ways to get a split wrong, as loaders of stages: each breaks those that hold `LAYER`, the whole apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from convoy.engine.ranks.load import load_member_stage
from convoy.evaluate.chain import StageLoader
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import LoadedStage, StageOptions
from convoy.wire.messages.control import StageAssignment

LAYER = 2


class Loop(dict[int, nn.Module]):
    """Order a stage's layers otherwise than it says that it has them."""

    def __init__(self, layers: dict[int, nn.Module], order: Sequence[int]) -> None:
        super().__init__(layers)
        self._order = order

    def values(self) -> Any:
        return [self[layer] for layer in self._order]

    def items(self) -> Any:
        return [(layer, self[layer]) for layer in self._order]


class ShiftedRotations:
    """Shift positions by one."""

    def __init__(self, rotations: Any) -> None:
        self._rotations = rotations

    def look_up(self, ropes: Any, positions: torch.Tensor, last: int) -> Any:
        return self._rotations.look_up(ropes, positions + 1, last + 1)


def split_only(change: Callable[[HostStage], None]) -> StageLoader:
    """Apply ``change`` to stages that hold `LAYER` and are not the whole model."""

    def load(
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        *,
        before: LoadedStage | None = None,
    ) -> LoadedStage:
        stage = load_member_stage(source, assignment, options)
        whole = assignment.end - assignment.start == source.spec.num_layers
        if not whole and assignment.start <= LAYER < assignment.end:
            assert isinstance(stage, HostStage)
            change(stage)
        return stage

    return load


def everywhere(change: Callable[[HostStage], None]) -> StageLoader:
    """Apply ``change`` to the whole model as well: only the library can tell."""

    def load(
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        *,
        before: LoadedStage | None = None,
    ) -> LoadedStage:
        stage = load_member_stage(source, assignment, options)
        if assignment.start <= LAYER < assignment.end:
            assert isinstance(stage, HostStage)
            change(stage)
        return stage

    return load


def skip(stage: HostStage) -> None:
    layers = dict(stage.layers)
    stage.modules.layers = Loop(layers, [i for i in layers if i != LAYER])


def run_twice(stage: HostStage) -> None:
    layers = dict(stage.layers)
    order = [i for layer in layers for i in [layer] * (1 + (layer == LAYER))]
    stage.modules.layers = Loop(layers, order)


def shift_positions(stage: HostStage) -> None:
    stage._rotations = ShiftedRotations(stage._rotations)  # type: ignore[assignment]


def perturb(stage: HostStage) -> None:
    """Change one number of one norm, by a thousandth."""
    with torch.no_grad():
        next(stage.layers[LAYER].parameters())[0] += 1e-3


def drop_last_of_the_first(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    *,
    before: LoadedStage | None = None,
) -> LoadedStage:
    """Lose the last layer of the first half, as 61 layers over two members do if both are rounded down."""
    if assignment.start == 0 and assignment.end < source.spec.num_layers:
        assignment = msgspec.structs.replace(assignment, end=assignment.end - 1)
    return load_member_stage(source, assignment, options)
