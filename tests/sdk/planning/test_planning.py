"""`convoy.plan` on the bundled models: the value that `convoy plan --json` prints."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import convoy
from cli.transcript import run_here
from convoy.cluster.status import ClusterStatus, StageStatus
from convoy.config.settings import Config
from convoy.errors import InputError, PlanError, UsageError
from convoy.sdk.planning.members import members_of
from convoy.sdk.planning.planning import PlanQuestion, make_plan

# So that nothing is measured.
TOLD = ("--speed", "10,100")
SIZES = {"alpha": 0.5, "beta": 0.5}


def test_a_plan_is_the_value_that_the_command_prints(tmp_path: Path) -> None:
    found = convoy.plan("demo", members={"alpha": 0.5, "beta": 0.5}, kernel="plain-f32", measure=False)
    assert [(stage.member, stage.span) for stage in found.stages] == [
        ("alpha", "0:5,output"),
        ("beta", "6:11"),
    ]
    assert found.rates is None
    (tmp_path / "plain.toml").write_text('[model]\nkernel = "plain-f32"\n')
    asked = ["plan", "demo", "--members", "alpha=0.5,beta=0.5", "--config", "plain.toml", *TOLD, "--json"]
    shown = json.loads(run_here(asked, tmp_path).stdout)
    assert shown["stages"] == [msgspec.structs.asdict(stage) for stage in found.stages]


def test_a_plan_counts_what_every_dtype_of_kv_takes() -> None:
    plain = convoy.plan("demo", members=SIZES, kernel="plain-f32", measure=False)
    assert plain.kv_dtype == "f32"
    taken = {one.kv_dtype: one.bytes_per_token for one in plain.kv_choices}
    each = plain.kv_bytes_per_token
    assert taken == {"f32": each, "bf16": each // 2, "f16": each // 2, "q8": each * 34 // 128}
    small = convoy.plan("demo", members=SIZES, kernel="plain-f32", kv_dtype="q8", measure=False)
    assert (small.kv_dtype, small.kv_bytes_per_token) == ("q8", taken["q8"])
    assert small.kv_choices == plain.kv_choices
    assert small.max_kv_tokens == plain.kv_choices[-1].max_kv_tokens > 3 * plain.max_kv_tokens
    assert small.blocks is not None
    assert plain.blocks is not None
    assert small.blocks.groups[0].block_bytes == plain.blocks.groups[0].block_bytes * 34 // 128


def test_a_dtype_of_kv_that_cannot_be_is_refused_with_those_that_can() -> None:
    with pytest.raises(InputError, match="kv_dtype is fp8, expected auto, f32, bf16, f16, q8"):
        convoy.plan("demo", members=2, kernel="plain-f32", kv_dtype="fp8", measure=False)


def test_members_that_cannot_hold_the_model_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"needs .* MB for .* but has"):
        convoy.plan("demo", members={"alpha": 0.01}, measure=False)


def test_a_plan_for_8_bit_products_holds_the_weights_of_their_kernel() -> None:
    exact, int8 = (
        convoy.plan("demo", members=1, kernel="exact-q8", compute=compute, measure=False)
        for compute in ("exact", "int8")
    )
    assert [stage.kernel for plan in (exact, int8) for stage in plan.stages] == ["exact-q8", "int8-q8"]
    with pytest.raises(UsageError, match="compute is 'fast', expected exact, int8 or fp8"):
        convoy.plan("demo", members=1, compute="fast", measure=False)


def test_a_plan_needs_a_model() -> None:
    with pytest.raises(UsageError, match="no model is named"):
        convoy.plan()


def test_a_longer_context_than_the_models_is_said() -> None:
    heard: list[str] = []
    members, named = (("alpha", None),), "demo"
    make_plan(PlanQuestion(Config(), named, members=members, context=9999, measured=False, note=heard.append))
    assert heard == ["demo has a context of 2048 tokens, so rates are for 2048 and not 9999"]


def stage_of(
    name: str, device: str = "cpu", *, address: str = "", num_bytes: int = 10**9, head: bool = False
) -> StageStatus:
    return StageStatus(
        *(name, 0, 3), embed=head, output=head, weight_bytes=1, can_read_prompts="no", address=address,
        head=head, device=device, memory_bytes=num_bytes,
    )  # fmt: skip


def running(*stages: StageStatus) -> ClusterStatus:
    return ClusterStatus(
        *("demo", True, "", "", "exact", 1, list(stages), 0, 0, 0, 0, 0, 0, 0, None),
    )


def test_the_members_of_a_running_cluster_have_its_memory_and_kinds() -> None:
    found = members_of(running(stage_of("beta", "cuda:0 (NVIDIA H200)"), stage_of("alpha", head=True)))
    assert [(one.name, one.memory_bytes, one.head) for one in found.offers] == [
        ("alpha", 10**9, True),
        ("beta", 10**9, False),
    ]
    assert found.kinds == {"alpha": "cpu", "beta": "cuda"}


def test_members_of_one_machine_share_the_memory_that_each_offered() -> None:
    heard: list[str] = []
    status = running(
        stage_of("alpha", address="192.0.2.1:7777", num_bytes=10**9, head=True),
        stage_of("beta", address="192.0.2.1:7778", num_bytes=10**9),
        stage_of("gamma", address="192.0.2.2:7777", num_bytes=3 * 10**9),
    )
    found = members_of(status, note=heard.append)
    assert [one.memory_bytes for one in found.offers] == [5 * 10**8, 5 * 10**8, 3 * 10**9]
    assert heard == ["alpha and beta share the machine at 192.0.2.1: its memory counts once"]


def test_memory_that_was_granted_to_members_here_stays_theirs() -> None:
    # Two kilobytes: this machine has room for both.
    status = running(
        stage_of("alpha", address="127.0.0.1:7777", num_bytes=2000, head=True),
        stage_of("beta", address="127.0.0.1:7778", num_bytes=2000),
    )
    assert [one.memory_bytes for one in members_of(status, own=["127.0.0.1"]).offers] == [2000, 2000]
    many = running(
        stage_of("alpha", address="127.0.0.1:7777", num_bytes=10**15, head=True),
        stage_of("beta", address="127.0.0.1:7778", num_bytes=10**15),
    )
    assert sum(one.memory_bytes for one in members_of(many, own=["127.0.0.1"]).offers) <= 10**15
