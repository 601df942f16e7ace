"""The start-up proof of exact mode, and what happens where it fails."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from convoy.errors import SelfCheckError, UsageError
from convoy.model.backends.host.checks import selfcheck
from convoy.model.backends.host.checks.selfcheck import (
    available_kernels,
    check_exact,
    check_heads,
    choose_kernel,
    least_tile_rows,
    why_not_exact,
)
from convoy.model.backends.host.stage import HostStage
from convoy.model.kernels.linear import PackedLinear
from convoy.model.layers.attention import LayerBatch, attend
from convoy.model.stage import StageOptions
from convoy.plan.spec.cache import CacheGroup
from convoy.wire.messages.control import StageAssignment
from support.tiny_models import Models, Threads


def drifting(x: torch.Tensor) -> torch.Tensor:
    """Change the last bit with the number of rows."""
    return x * (1 + 2.0**-23) if x.shape[0] == 17 else x


@pytest.fixture
def drifting_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: drifting(forward(self, x)))


def test_exact_mode_holds_here_on_one_and_two_threads() -> None:
    check_exact(1)
    check_exact(2)
    assert choose_kernel("auto") == "exact-f32"
    assert available_kernels("auto")[:2] == ["exact-f32", "plain-f32"]  # 8-bit linears behind them, if at all
    assert available_kernels("exact-f32") == ["exact-f32"]
    assert available_kernels("plain-f32") == ["plain-f32"]


def test_the_check_leaves_the_thread_count_alone(threads: Threads) -> None:
    threads(1)
    check_exact(2)
    assert torch.get_num_threads() == 1


def test_the_check_is_quick() -> None:
    # on one thread: a second one spins, and counts, while other processes hold its core
    check_exact(1)
    start = time.process_time()
    check_exact(1)
    assert time.process_time() - start < 1.0


@pytest.mark.usefixtures("drifting_linear")
def test_a_linear_whose_rows_feel_each_other_is_found() -> None:
    with pytest.raises(SelfCheckError, match="a linear of 40 to 105 on 1 threads with 17 rows"):
        check_exact()
    assert choose_kernel("auto") == "plain-f32"
    assert "17 rows" in why_not_exact()
    assert available_kernels("auto") == ["plain-f32"]
    with pytest.raises(SelfCheckError):
        choose_kernel("exact-f32")
    assert choose_kernel("plain-f32") == "plain-f32"


@pytest.mark.usefixtures("drifting_linear")
def test_a_stage_checks_the_shapes_of_its_own_linears(models: Models) -> None:
    source = models.source("odd")
    assignment = StageAssignment("a", 0, 1, False, False)
    with pytest.raises(SelfCheckError, match="a linear of"):
        HostStage.load(source, assignment, StageOptions())
    HostStage.load(source, assignment, StageOptions(kernel="plain-f32"))


def test_attention_that_depends_on_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def moody(query: torch.Tensor, kv: torch.Tensor, layer: LayerBatch) -> torch.Tensor:
        return attend(query, kv, layer) * (1 + 2.0**-23 * (query.shape[0] == 60))

    monkeypatch.setattr(selfcheck, "attend", moody)
    with pytest.raises(SelfCheckError, match="attention"):
        check_exact()


def bmm_that_drifts(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[int], bool]) -> None:
    """Let batched matmuls drift by a last bit where the number of rows is ``wrong``."""
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(a, b) * (1 + 2.0**-23 * wrong(a.shape[1])))


def test_where_small_matmuls_differ_tiles_are_padded_and_exact_mode_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bmm_that_drifts(monkeypatch, lambda rows: rows < 16)
    assert least_tile_rows(64) == 16
    check_heads([CacheGroup("full", None, (0,), 16, 4, 64, 64)])


def test_where_large_matmuls_differ_exact_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bmm_that_drifts(monkeypatch, lambda rows: rows == 256)
    with pytest.raises(SelfCheckError, match="attention"):
        check_heads([CacheGroup("full", None, (0,), 16, 4, 64, 64)])


def test_without_packed_linears_the_plain_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "exact_available", lambda: False)
    assert choose_kernel("auto") == "plain-f32"
    assert "packed" in why_not_exact()


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(UsageError, match="fast"):
        choose_kernel("fast")
