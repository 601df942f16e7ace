"""What a machine measures of itself."""

from __future__ import annotations

import time

import pytest
import torch

from convoy.model.linear import packed_available
from convoy.model.speed import measure_speed

KERNELS = ["plain-f32", *(["exact-f32"] if packed_available() else [])]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_measurement_is_quick_and_leaves_the_threads_alone(kernel: str) -> None:
    before, began_s = torch.get_num_threads(), time.process_time()
    speed = measure_speed(kernel, 1)
    assert time.process_time() - began_s < 10.0, "with what has to be imported"
    assert torch.get_num_threads() == before
    assert 1e7 < speed.read_bytes_per_s < 1e13
    assert 1e8 < speed.flop_per_s < 1e16
    assert speed.few_flop_per_s is not None
    assert 1e8 < speed.few_flop_per_s < 1e16
    assert 1e-5 < speed.layer_s < 0.1
    assert speed.measured
    assert len(speed.text().split(",")) == 8, "all of it can be told elsewhere"
