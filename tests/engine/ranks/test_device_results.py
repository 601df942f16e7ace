from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from convoy.engine.ranks.device_results import WatchedResult, WatchedSamples
from convoy.errors import CollectiveError, StepError
from convoy.model.sampling.output_rows import SampleResult, SampleTask
from convoy.model.sampling.sample import Sampled
from convoy.model.stage import Computed


@dataclass
class Devices:
    """Stand for a group of ranks: whether one gave up, and how often that was asked."""

    gave_up: bool
    asked: int = 0

    def check(self) -> None:
        self.asked += 1
        if self.gave_up:
            raise CollectiveError("a rank did not come to a sum")


def sampled(*, failed: bool) -> SampleTask:
    error = StepError("3 of 8 logits are not finite, expected none") if failed else None
    return SampleTask((SampleResult(Sampled(1)), SampleResult(Sampled(0), error=error)))


def hidden(value: float) -> Computed:
    rows = torch.zeros(3, 1024)
    rows[1, 512:] = value  # what one program of a sum has
    return Computed(rows)


@pytest.mark.parametrize("gave_up", [False, True])
def test_devices_are_not_asked_while_all_are_numbers(gave_up: bool) -> None:
    devices = Devices(gave_up)
    assert len(WatchedSamples(sampled(failed=False), devices.check).outcomes()) == 2
    assert WatchedResult(hidden(1.0), devices.check).wait().shape == (3, 1024)
    assert devices.asked == 0


def test_what_is_no_number_for_want_of_a_rank_loses_the_stage() -> None:
    devices = Devices(gave_up=True)
    with pytest.raises(CollectiveError):
        WatchedSamples(sampled(failed=True), devices.check).outcomes()
    with pytest.raises(CollectiveError):
        WatchedResult(hidden(float("nan")), devices.check).wait()


def test_what_is_no_number_by_itself_is_that_requests_misfortune() -> None:
    devices = Devices(gave_up=False)
    assert WatchedSamples(sampled(failed=True), devices.check).outcomes()[1].error is not None
    assert WatchedResult(hidden(float("inf")), devices.check).wait().isinf().any()
    assert devices.asked == 2
