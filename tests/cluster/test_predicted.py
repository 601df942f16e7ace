"""What a plan says of memory beforehand, against what members have once they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.cluster.options import HeadOptions
from convoy.cluster.status import ClusterStatus
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.linear import packed_available
from convoy.model.kernels.registry import own_form
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.placement import Placement, place
from convoy.plan.report import report, report_blocks
from support.cluster import MEMBER, running_cluster
from support.compiled import nothing_compiled
from support.odd_models import make_odd_llama
from support.tiny_models import build_model

TOLERANCE = 0.05
Sources = Callable[[str], ModelSource]
needs_exact = pytest.mark.skipif(not packed_available(), reason="no packed linears here")


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    def make(kind: str) -> ModelSource:
        if kind == "demo":
            return ModelSource.resolve(kind)
        make_odd_llama(tmp_path)  # for its tokenizer
        build_model(kind).save_pretrained(tmp_path)
        return ModelSource.resolve(str(tmp_path))

    return make


def planned(source: ModelSource, kernel: str, memory_bytes: int) -> Placement:
    offers = [
        MemberOffer(
            name,
            memory_bytes,
            name == "alpha",
            num_threads=1,
            kernel=kernel,
            unpacks=own_form(kernel) != kernel,
        )
        for name in ("alpha", "beta")
    ]
    return place(source.spec, offers)


# Each kernel once, among models of full attention, windows, latents, states and compressed keys
@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        pytest.param("demo", "exact-f32", marks=[needs_exact, pytest.mark.long]),
        pytest.param("demo", "exact-q4", marks=needs_exact),
        pytest.param("demo", "int8-q4", marks=needs_exact),
        pytest.param("demo", "plain-f32", marks=pytest.mark.long),
        pytest.param("qwen3_moe", "plain-f32", marks=pytest.mark.long),
        pytest.param("gpt_oss", "exact-f32", marks=needs_exact),
        pytest.param("gemma3", "exact-f32", marks=[needs_exact, pytest.mark.long]),
        pytest.param("gemma4", "exact-q8", marks=needs_exact),
        pytest.param("deepseek_v3", "plain-f32", marks=pytest.mark.long),
        pytest.param("qwen3_5", "plain-f32", marks=pytest.mark.long),
        ("deepseek_v4", "plain-f32"),
    ],
)
def test_weights_and_blocks_are_what_the_plan_said(sources: Sources, kind: str, kernel: str) -> None:
    assert_planned(sources(kind), kernel)


@needs_exact
def test_members_without_compiled_code_take_what_the_plan_said(sources: Sources) -> None:
    with nothing_compiled():
        status = assert_planned(sources("demo"), "exact-f32")
    assert [stage.unpacks for stage in status.stages] == [True, True]


def assert_planned(source: ModelSource, kernel: str) -> ClusterStatus:
    """Compare a plan with members that took so much, and return their status."""
    spec = source.spec
    whole = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=own_form(kernel))
    memory = whole + 20 * spec.kv_bytes(0, spec.num_layers, 16, kernel)  # too little for all that is wanted
    placement = planned(source, kernel, memory)
    options = HeadOptions(max_batch=8, prefill_chunk=64)
    blocks = report_blocks(placement, options.demand(block_size=16, max_context=spec.max_context))
    member = replace(MEMBER, memory_bytes=memory, kernel=kernel)
    asked: dict[str, Any] = {"num_blocks": 0, "max_batch": 8, "prefill_chunk": 64, "parallel": "pipeline"}
    with running_cluster(source, 2, member=member, **asked) as cluster:
        active = cluster.head.active_plan
        assert active is not None
        assert active.placement.stages == placement.stages
        for stage in report(placement).stages:
            found = active.weight_bytes[stage.member]
            assert abs(stage.weight_bytes - found) <= TOLERANCE * found, stage.member
        for group, count in zip(blocks.groups, active.num_blocks, strict=True):
            assert abs(group.num_blocks - count) <= TOLERANCE * count, group.name
        status = cluster.status()
    if all(group.attends for group in spec.cache_groups):
        assert not blocks.is_all_wanted, "the members' memory is what limits it"
    return status
