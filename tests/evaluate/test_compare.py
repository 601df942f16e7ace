"""Logits compared with the library's float32, and in doubt with its float64."""

from __future__ import annotations

import pytest
import torch

from convoy.config.kernels import EXACT, KERNELS
from convoy.evaluate.compare import Comparison, Expected
from convoy.evaluate.runs import Run

LIMITS_OF_EXACT = KERNELS[EXACT].bounds
REACH = 12.0  # so 2.4e-5 is allowed
TRUE = torch.tensor([[REACH, 1.0, 0.0], [2.0, REACH, 0.0]], dtype=torch.float64)


def expected_of(ours: float, library: float) -> tuple[Expected, Run]:
    """Return one prompt of two tokens: our logits and the library's, each so far from the true ones."""
    run = Run("one piece", 0, 0, (TRUE + ours).float())
    expected = Expected([[7, 8]])
    expected.unsplit = [run.logits]
    expected.add_library([(TRUE - library).float()])
    return expected, run


def failures(expected: Expected, run: Run) -> list[str]:
    comparison = Comparison(expected, LIMITS_OF_EXACT)
    comparison.add(run)
    return [line for line in comparison.failures("the library") if line.startswith("prompt")]


def test_a_prompt_near_the_library_is_not_in_doubt() -> None:
    expected, run = expected_of(ours=5e-6, library=5e-6)
    assert expected.doubtful(LIMITS_OF_EXACT) == []
    assert failures(expected, run) == []


def test_a_prompt_beyond_half_of_the_limit_is_in_doubt_and_beyond_the_whole_fails() -> None:
    expected, run = expected_of(ours=9e-6, library=2.8e-5)
    assert expected.doubtful(LIMITS_OF_EXACT) == [0]
    (line,) = failures(expected, run)
    assert "expected at most 2.4e-05" in line


def test_where_the_float32_of_the_library_is_what_is_off_its_float64_judges() -> None:
    expected, run = expected_of(ours=9e-6, library=2.8e-5)
    expected.float64 = {0: TRUE}
    assert expected.own_errors()[0] == pytest.approx(2.8e-5, rel=0.1)
    assert failures(expected, run) == []


@pytest.mark.parametrize(("ours", "passes"), [(5e-5, True), (6.5e-5, False), (1e-3, False)])
def test_ours_may_round_twice_as_far_as_the_library_does_and_no_further(ours: float, passes: bool) -> None:
    expected, run = expected_of(ours=ours, library=2.8e-5)
    expected.float64 = {0: TRUE}
    found = failures(expected, run)
    assert (not found) is passes
    if found:
        assert "; from its float64 by " in found[0]


def test_a_logit_that_is_no_number_is_never_right() -> None:
    expected, run = expected_of(ours=float("nan"), library=2.8e-5)
    expected.float64 = {0: TRUE}
    assert expected.doubtful(LIMITS_OF_EXACT) == [0]
    assert failures(expected, run)
