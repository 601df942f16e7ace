"""Stages on MLX keep the contract of a stage, in both dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from convoy.config.kernels import MLX_F32, MLX_KERNELS
from convoy.engine.ranks.load import load_member_stage
from convoy.model.backends.registry import load_stage
from convoy.model.mlx_device import why_no_mlx
from convoy.model.stage import LoadedStage, StageOptions
from support.stage_conformance import SOURCE, WHOLE, LoadedStageConformance

if why_no_mlx():
    pytest.skip(f"{why_no_mlx()}: `make test-mlx` installs it", allow_module_level=True)


class TestMlxStage(LoadedStageConformance):
    """Run the suite."""

    @pytest.fixture(scope="class", params=MLX_KERNELS)
    @classmethod
    def stage(cls, request: pytest.FixtureRequest) -> Iterator[LoadedStage]:
        options = StageOptions(kernel=request.param, device="mlx", require_tags=False)
        found = load_stage(SOURCE, WHOLE, options)
        yield found
        found.give_up()


class TestMlxRankStages(LoadedStageConformance):
    """Run the suite over two ranks."""

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls) -> Iterator[LoadedStage]:
        options = StageOptions(kernel=MLX_F32, device="mlx+mlx", require_tags=False)
        found = load_member_stage(SOURCE, WHOLE, options)
        yield found
        found.give_up()
