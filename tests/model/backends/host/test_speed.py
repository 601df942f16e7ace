"""What a machine measures of itself."""

from __future__ import annotations

import time

import pytest
import torch

from convoy.model.backends.host.layer_speed import seconds_beyond
from convoy.model.backends.host.speed import measure_speed
from convoy.model.kernels.linear import packed_available
from support.cases import cases

KERNELS = ["plain-f32", *(["exact-f32"] if packed_available() else [])]


@pytest.mark.parametrize("kernel", cases(KERNELS, KERNELS[-1].__eq__))
def test_a_measurement_is_quick_and_leaves_the_threads_alone(kernel: str) -> None:
    before, began_s = torch.get_num_threads(), time.process_time()
    speed = measure_speed(kernel, 1)
    assert time.process_time() - began_s < 10.0, "with what has to be imported"
    assert torch.get_num_threads() == before
    assert 1e7 < speed.read_bytes_per_s < 1e13
    assert 1e8 < speed.flop_per_s < 1e16
    assert speed.few_flop_per_s is not None
    assert 1e8 < speed.few_flop_per_s < 1e16
    assert 1e-7 < speed.layer_s < 10
    assert not speed.assumed
    assert len(speed.text().split(",")) == 8, "all of it can be told elsewhere"


def test_a_longer_step_that_seemed_shorter_still_has_a_rate() -> None:
    """Seen on busy cores: a layer of a billionth of a second, and a plan that rested on it."""
    assert seconds_beyond(3.0, 1.0) == 2.0
    assert seconds_beyond(3.0, 4.0) == pytest.approx(0.06)
