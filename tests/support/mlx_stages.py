"""Load stages on MLX between cuts, for tests that have skipped where it is missing."""

from __future__ import annotations

import itertools

from convoy.model.backends.registry import load_stage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import LoadedStage, StageOptions
from convoy.wire.messages.control import StageAssignment


class Loader:
    """Load stages, and give all of them up in the end."""

    def __init__(self) -> None:
        self._held: list[LoadedStage] = []

    def __call__(self, source: ModelSource, *cuts: int, kernel: str = "mlx-f32") -> list[LoadedStage]:
        options = StageOptions(kernel=kernel, device="mlx", require_tags=False)
        ends = [0, *cuts, source.spec.num_layers]
        stages = [
            load_stage(
                source,
                StageAssignment(f"m{a}", a, b, embed=not a, output=b == source.spec.num_layers),
                options,
            )
            for a, b in itertools.pairwise(ends)
        ]
        self._held.extend(stages)
        return stages

    def give_up(self) -> None:
        for stage in self._held:
            stage.give_up()
