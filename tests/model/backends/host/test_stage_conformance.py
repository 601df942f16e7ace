"""The host's stage keeps the contract of a stage."""

from __future__ import annotations

import pytest

from convoy.errors import ConvoyError, ModelError
from convoy.model.backends.registry import load_stage
from convoy.model.stage import LoadedStage, StageOptions
from support.stage_conformance import SOURCE, WHOLE, LoadedStageConformance, begin, step, tokens_of

OPTIONS = StageOptions(num_threads=1, require_tags=False)


@pytest.fixture(scope="module")
def stage() -> LoadedStage:
    return load_stage(SOURCE, WHOLE, OPTIONS)


class TestHostStage(LoadedStageConformance):
    """Run the suite."""


def test_a_stage_that_was_given_up_runs_nothing_and_its_weights_are_read_again() -> None:
    first = load_stage(SOURCE, WHOLE, OPTIONS)
    first.give_up()
    with pytest.raises(ConvoyError):
        first.run(step(), None, tokens_of())
    second = load_stage(SOURCE, WHOLE, OPTIONS)
    begin(second)
    assert second.bytes_read > 0
    assert second.run(step(), None, tokens_of()).shape[0] > 0


def test_a_device_without_a_backend_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(ModelError, match="'tpu:0' is not supported, expected cpu, cuda"):
        load_stage(SOURCE, WHOLE, StageOptions(device="tpu:0"))
