"""Load stages on MLX between cuts, for tests that have skipped where it is missing."""

from __future__ import annotations

import itertools

from convoy.engine.ranks.host_ranks import JOIN
from convoy.engine.ranks.load import load_member_stage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import LoadedStage, StageOptions
from convoy.wire.messages.control import StageAssignment


class Loader:
    """Load stages, and give all of them up in the end."""

    def __init__(self) -> None:
        self._held: list[LoadedStage] = []

    def __call__(
        self, source: ModelSource, *cuts: int, kernel: str = "mlx-f32", ranks: int = 1
    ) -> list[LoadedStage]:
        device = JOIN.join(["mlx"] * ranks)
        options = StageOptions(kernel=kernel, device=device, require_tags=False)
        ends = [0, *cuts, source.spec.num_layers]
        stages = [
            load_member_stage(
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
