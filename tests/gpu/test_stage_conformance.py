"""Stages on CUDA devices keep the contract of a stage: one device, several in a row, and several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.kernels import why_not

if why_not() is not None or not torch.cuda.is_available():
    pytest.skip(why_not() or "no CUDA device", allow_module_level=True)

from convoy.engine.ranks.load import load_member_stage
from convoy.model.backends.cuda.options import KERNEL
from convoy.model.stage import LoadedStage, StageOptions
from support.stage_conformance import SOURCE, WHOLE, LoadedStageConformance

pytestmark = pytest.mark.gpu


class TestCudaStages(LoadedStageConformance):
    """Run the suite on the devices that this machine has."""

    @pytest.fixture(scope="class", params=["cuda:0", "cuda:0,cuda:1", "cuda:0+cuda:1"])
    @classmethod
    def stage(cls, request: pytest.FixtureRequest) -> Iterator[LoadedStage]:
        needed, there = request.param.count("cuda"), torch.cuda.device_count()
        if there < needed:
            pytest.skip(f"this machine has {there} CUDA devices, and {needed} are needed")
        options = StageOptions(kernel=KERNEL, device=request.param, require_tags=False)
        found = load_member_stage(SOURCE, WHOLE, options)
        yield found
        found.give_up()
