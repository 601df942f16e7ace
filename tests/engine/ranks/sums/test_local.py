"""Ranks of one member on one host: gloo on loopback alone, and a stage that has them as threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from convoy.engine.ranks.host_ranks import HostRankStages
from convoy.engine.ranks.load import load_member_slice, load_member_stage
from convoy.engine.ranks.sums.local import LocalCollective, LocalRanks
from convoy.errors import CollectiveError, ConvoyError, PlanError, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.stage import LoadedStage, StageOptions
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import Row, StageAssignment, Step
from support.rings import run_at_once
from support.tiny_models import Chain, Models

WHOLE = StageAssignment("alpha", 0, 4, embed=True, output=True)
PROMPT = [(7 * i) % 100 for i in range(40)]


def group_of(world_size: int, deadline_s: float = 10.0) -> LocalRanks:
    return LocalRanks("gloo", ["alpha"] * world_size, deadline_s)


def on_all(group: LocalRanks, parts: list[torch.Tensor]) -> list[torch.Tensor | ConvoyError]:
    def work(end: LocalCollective) -> torch.Tensor:
        return end.all_reduce(parts[end.rank])

    return run_at_once([lambda end=end: work(end) for end in group.ends])  # type: ignore[misc]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_are_in_the_order_of_ranks_and_alike_from_run_to_run(world_size: int) -> None:
    group = group_of(world_size)
    for dtype in (torch.float32, torch.bfloat16):
        made = torch.Generator().manual_seed(1)
        scales = (1.0, 1e4, 1e-3, 10.0)
        parts = [(torch.randn(3, 500, generator=made) * scales[r]).to(dtype) for r in range(world_size)]
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        for _ in range(5):
            for found in on_all(group, parts):
                assert torch.equal(found, expected.to(dtype))  # type: ignore[arg-type]
    gathered = run_at_once([lambda end=end: end.gather(parts[end.rank]) for end in group.ends])  # type: ignore[misc]
    assert all(torch.equal(a, b) for a, b in zip(gathered[0], parts, strict=True))  # type: ignore[arg-type]
    assert gathered[1:] == [None] * (world_size - 1)


def test_nothing_listens_but_on_loopback() -> None:
    group = group_of(2)
    on_all(group, [torch.ones(3)] * 2)
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert all(connection.laddr.ip in {"127.0.0.1", "::1"} for connection in listening), listening


def test_plain_collectives_between_members_are_refused_with_the_reason() -> None:
    for backend in ("gloo", "nccl"):
        with pytest.raises(PlanError, match="would send partial sums in clear") as refused:
            LocalRanks(backend, ["alpha", "beta"])
        assert "alpha and beta" in refused.value.message
        assert refused.value.hint == "ranks on several members add through sealed links, with no setting"
    with pytest.raises(PlanError, match="'mpi' is no plain collective, expected gloo or nccl"):
        LocalRanks("mpi", ["alpha", "alpha"])


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="there is nccl")
def test_a_backend_that_pytorch_lacks_is_named() -> None:
    with pytest.raises(PlanError, match="this build of PyTorch has no nccl"):
        LocalRanks("nccl", ["alpha", "alpha"])


def test_a_rank_that_does_not_come_is_named_with_the_operation() -> None:
    group = group_of(2, 2.0)
    on_all(group, [torch.ones(3)] * 2)
    with pytest.raises(CollectiveError, match=r"rank 1 did not come to operation 1, an all-reduce of gloo"):
        group.ends[0].all_reduce(torch.ones(3))
    with pytest.raises(CollectiveError, match="rank 1 did not come to operation 1"):
        group.ends[1].all_reduce(torch.ones(3))


def test_abort_wakes_who_waits_within_a_moment() -> None:
    # An hour: the deadline of the sum does not wake the rank.
    group = group_of(2, 3600.0)
    threading.Timer(0.1, group.ends[1].abort, [ConvoyError("enough")]).start()
    (found,) = run_at_once([lambda: group.ends[0].all_reduce(torch.ones(3))])
    assert isinstance(found, CollectiveError)
    assert found.message == "enough"


# Ranks as threads, which act as one stage.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("local"))


def load(models: Models, device: str = "cpu+cpu", **rest: Any) -> LoadedStage:
    source = models.source("odd")
    options = StageOptions(device=device, num_threads=2, require_tags=False)
    assignment = StageAssignment("alpha", 0, source.spec.num_layers, embed=True, output=True)
    return load_member_stage(source, assignment, options, **rest)


def ranks_of(models: Models, **rest: Any) -> HostRankStages:
    stage = load(models, **rest)
    assert isinstance(stage, HostRankStages)
    return stage


@pytest.fixture(scope="module")
def ranks(models: Models) -> Iterator[HostRankStages]:
    stage = ranks_of(models)
    yield stage
    stage.release()


def chain_of(stage: LoadedStage) -> Chain:
    return Chain([stage])


def test_two_ranks_are_the_single_stage_within_rounding_and_alike_from_run_to_run(
    models: Models, ranks: HostRankStages
) -> None:
    expected = models.chain("odd").run((0, PROMPT))[0]
    found = [chain_of(ranks).run((0, PROMPT))[0] for _ in range(2)]
    assert torch.equal(*found)
    assert (found[0] - expected).abs().max() <= 1e-4
    assert ranks.weight_share < 0.6


def test_kv_of_a_session_has_the_heads_of_all_ranks(models: Models, ranks: HostRankStages) -> None:
    alone, ours = models.chain("odd"), chain_of(ranks)
    alone.run((0, PROMPT))
    ours.run((0, PROMPT))
    blocks = ours.tables[0][0]
    whole = alone.stages[0].read_blocks(0, 2, alone.tables[0][0])
    assert (ranks.read_blocks(0, 2, blocks) - whole).abs().max() <= 1e-4
    free = [block for block in range(10) if block not in blocks][: len(blocks)]
    num_layers = models.source("odd").spec.num_layers
    kv = ranks.read_blocks(0, num_layers, blocks)
    ranks.write_blocks(0, free, [bytes([i]) * 16 for i in range(len(free))], kv)
    assert torch.equal(ranks.read_blocks(0, num_layers, free), kv)
    with pytest.raises(StepError, match="expected"):
        ranks.write_blocks(0, free, [bytes(16)] * len(free), kv[..., :1, :])


def test_a_step_that_makes_no_sense_is_refused_and_the_ranks_go_on(ranks: HostRankStages) -> None:
    chain = chain_of(ranks)
    with pytest.raises(StepError):
        ranks.run(Step(0, [], [], [Row(9, 5, 1, 1)], b""), None, torch.tensor([1]))
    assert chain.run((0, PROMPT))[0].shape[0] == len(PROMPT)


def test_a_rank_that_fails_ends_the_other_ranks_and_none_waits(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = ranks_of(models)
    chain = chain_of(stage)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(stage.stages[1], "run", fail)
    # Rank 0 waits in a sum meanwhile. If nothing woke it, its deadline would end the ranks with another
    # error.
    with pytest.raises(RuntimeError, match="no memory"):
        chain.run((0, PROMPT))
    monkeypatch.undo()
    with pytest.raises(CollectiveError, match="a rank failed: RuntimeError"):
        chain.run((0, [1]))
    stage.release()


def test_what_two_ranks_hold_is_kept_for_those_that_take_their_place(models: Models) -> None:
    before = ranks_of(models)
    found = chain_of(before).run((0, PROMPT))[0]
    after = ranks_of(models, before=before)
    assert after.bytes_read == 0
    assert torch.equal(chain_of(after).run((0, PROMPT))[0], found)
    alone = load(models, "cpu", before=after)
    assert isinstance(alone, HostStage)
    assert alone.bytes_read > 0


def test_ranks_that_cannot_share_a_model_are_refused_with_both_numbers(models: Models) -> None:
    with pytest.raises(PlanError, match="heads"):
        load(models, "cpu+cpu+cpu")
    source = models.source("odd")
    assignment = StageAssignment("alpha", 0, source.spec.num_layers, embed=True, output=True)
    with pytest.raises(PlanError, match="cannot be split over cpu\\+cpu again"):
        load_member_slice(source, assignment, StageOptions(device="cpu+cpu"), Shard(0, 2))


def test_threads_of_ranks_end_with_their_stage(models: Models, tmp_path: Path) -> None:
    stage = ranks_of(models)
    names = {"rank 0", "rank 1"}
    mine = [thread for thread in threading.enumerate() if thread.name in names][-2:]
    stage.release()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()
