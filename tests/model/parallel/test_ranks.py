"""Test a rank of a stage: the weights that it reads and holds, its work with other ranks, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.errors import ModelError, PlanError, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.backends.registry import load_slice
from convoy.model.checkpoints.slices import Slices
from convoy.model.checkpoints.source import ModelSource
from convoy.model.collective import Alone
from convoy.model.kernels.native.library import keeps_stored
from convoy.model.stage import StageOptions
from convoy.plan.span import Span
from convoy.plan.spec.sharding import Experts, Shard, rank_bytes
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step
from support.cases import cases
from support.quantised_models import Quantise, fp8, mlx, mlx_gpt_oss, mxfp4, write
from support.thread_collective import RankStages, ThreadGroup
from support.tiny_models import Chain, Models, Prompt

EXACT = StageOptions(require_tags=False)


def assignment_of(source: ModelSource) -> StageAssignment:
    return StageAssignment("a", 0, source.spec.num_layers, True, True)


def ranks_of(source: ModelSource, world_size: int, experts: Experts = "split") -> list[HostStage]:
    mine = assignment_of(source)
    shards = [Shard(rank, world_size, experts) for rank in range(world_size)]
    return [HostStage.load(source, mine, EXACT, shard=shard) for shard in shards]


def chain_of(stages: Any) -> Chain:
    """Ranks have the face of one stage."""
    return Chain([stages])


@pytest.mark.parametrize(
    "kind",
    cases(
        ["odd", "biased", "gpt_oss", "gemma4", "gemma4 e", "phi3", "mixtral"],
        ("gpt_oss", "gemma4 e", "phi3").__contains__,
    ),
)
def test_a_rank_reads_and_holds_its_slices_and_no_more(models: Models, kind: str) -> None:
    source = models.source(kind)
    span = Span(0, source.spec.num_layers, output=True)
    for rank in range(2):
        stage = HostStage.load(source, assignment_of(source), EXACT, shard=Shard(rank, 2))
        assert stage.weight_bytes == rank_bytes(source.spec, span, "exact-f32", 2)
        assert stage.bytes_read == rank_bytes(source.spec, span, "plain-f32", 2)  # stored as float32
        assert stage.weight_share < 0.6


def test_a_whole_stage_has_the_whole_share(models: Models) -> None:
    (stage,) = models.chain("odd").stages
    assert stage.weight_share == 1.0


def test_progress_ends_at_what_is_read(models: Models) -> None:
    source, told = models.source("odd"), []
    stage = HostStage.load(
        source, assignment_of(source), EXACT, lambda *seen: told.append(seen), shard=Shard(1, 4)
    )
    assert told[-1] == (stage.bytes_read, stage.bytes_read)


@pytest.mark.parametrize("kind", ["odd", "gpt_oss", "phi3", "qwen3_moe", "gemma4 e"])
def test_slices_of_all_ranks_are_the_whole(models: Models, kind: str) -> None:
    source = models.source(kind)
    slices = [Slices(source.spec, Shard(rank, 2)) for rank in range(2)]
    for name, tensor in load_file(source.path / "model.safetensors").items():
        parts = [own.take(name, tensor) for own in slices]
        if all(part.shape == tensor.shape for part in parts):
            continue  # the same on all ranks, or rank 0's alone
        found, expected = (
            torch.sort(x.flatten()).values for x in (torch.cat([p.flatten() for p in parts]), tensor)
        )
        assert torch.equal(found[found != 0], expected[expected != 0]), name


def test_few_key_heads_are_repeated_and_a_bias_is_in_one_part(models: Models) -> None:
    spec = models.source("odd").spec  # 2 K/V heads of 8
    keys, bias = torch.arange(16)[:, None], torch.ones(40)
    rows = [
        Slices(spec, Shard(rank, 4)).take("model.layers.0.self_attn.k_proj.weight", keys) for rank in range(4)
    ]
    assert [int(part[0]) for part in rows] == [0, 0, 8, 8]
    sums = [
        Slices(spec, Shard(rank, 4)).take("model.layers.0.self_attn.o_proj.bias", bias) for rank in range(4)
    ]
    assert torch.equal(torch.stack(sums).sum(0), bias)


def test_the_last_part_of_a_vocabulary_is_filled_up(models: Models) -> None:
    spec = models.source("odd").spec
    whole = torch.arange(105)[:, None] + 1
    parts = [Slices(spec, Shard(rank, 4)).take("model.embed_tokens.weight", whole) for rank in range(4)]
    assert [len(part) for part in parts] == [27, 27, 27, 27]
    assert torch.equal(torch.cat(parts)[:105], whole)
    assert not torch.cat(parts)[105:].any()


def test_a_decode_sends_one_row_for_each_sum(models: Models, prompt: Prompt) -> None:
    source = models.source("odd")
    stages = RankStages(ranks_of(source, 2))
    chain = chain_of(stages)
    chain.run((0, prompt(9)))
    before = [member.num_elements for member in stages.group.members]
    chain.run((0, [5]))
    sums = 1 + 2 * source.spec.num_layers  # the embedding; attention and MLP of each layer
    sent = [member.num_elements - was for member, was in zip(stages.group.members, before, strict=True)]
    assert sent == [sums * source.spec.hidden_size] * 2


def test_a_rank_alone_is_refused_until_it_joined(models: Models) -> None:
    first, _ = ranks_of(models.source("odd"), 2)
    first.make_pools(4)
    step = Step(0, [], [BlockGrant.append(0, 0, [0])], [Row(0, 0, 1, 1)], b"")
    with pytest.raises(StepError, match="rank 0 of 2 has not joined"):
        first.run(step, None, torch.tensor([1]))
    with pytest.raises(ModelError, match="rank 1 of 2 for a stage of rank 0 of 2"):
        first.join(ThreadGroup(2).members[1])
    with pytest.raises(ModelError, match="rank 0 of 1 for a stage of rank 0 of 2"):
        first.join(Alone())


def test_a_whole_stage_joins_nobody_but_itself(models: Models) -> None:
    (stage,) = models.chain("odd").stages
    stage.join(Alone())
    with pytest.raises(ModelError, match="rank 0 of 2 for a stage of rank 0 of 1"):
        stage.join(ThreadGroup(2).members[0])


def test_a_rank_made_of_another_reads_what_it_lacks_and_joins_anew(models: Models, prompt: Prompt) -> None:
    source, tokens = models.source("odd"), prompt(20)
    part = StageAssignment("a", 0, 3, True, True)
    before = [HostStage.load(source, part, EXACT, shard=Shard(rank, 2)) for rank in range(2)]
    RankStages(before)
    mine = assignment_of(source)
    after = [HostStage.load(source, mine, EXACT, before=old, shard=old.shard) for old in before]
    fresh = ranks_of(source, 2)
    after[0].make_pools(4)
    step = Step(0, [], [BlockGrant.append(0, 0, [0])], [Row(0, 0, 1, 1)], b"")
    assert 0 < after[0].bytes_read < fresh[0].bytes_read
    with pytest.raises(StepError, match="has not joined"):
        after[0].run(step, None, torch.tensor([1]))
    (found,), (expected,) = (chain_of(RankStages(them)).run((0, tokens)) for them in (after, fresh))
    assert torch.equal(found, expected)


def test_a_stage_of_another_shape_is_no_start_for_a_rank(models: Models) -> None:
    source = models.source("odd")
    whole = HostStage.load(source, assignment_of(source), EXACT)
    stage = HostStage.load(source, assignment_of(source), EXACT, before=whole, shard=Shard(0, 2))
    assert (
        stage.bytes_read == HostStage.load(source, assignment_of(source), EXACT, shard=Shard(0, 2)).bytes_read
    )


def test_ranks_that_cannot_share_a_layer_are_refused_before_anything_is_read(models: Models) -> None:
    source = models.source("odd")
    with pytest.raises(PlanError, match="4 heads in layers of full, which 3 ranks"):
        HostStage.load(source, assignment_of(source), EXACT, shard=Shard(0, 3))
    with pytest.raises(ModelError, match="the layers of a stage on cpu or mlx, not on cuda:0"):
        load_slice(source, assignment_of(source), StageOptions(device="cuda:0"), Shard(0, 2))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (
            "model.layers.2.self_attn.q_proj.weight",
            (24, 40),
            "q_proj.weight has shape [12, 40], expected [16, 40]",
        ),
        (
            "model.layers.1.mlp.down_proj.weight",
            (40, 43),
            "has shape [40, 43], which 2 ranks cannot share alike",
        ),
        ("model.embed_tokens.weight", (91, 40), "embed_tokens.weight has shape [46, 40], expected [53, 40]"),
    ],
)
def test_a_tensor_of_a_wrong_shape_is_named_with_its_file(
    models: Models, tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    whole = models.directory("odd")
    shutil.copy(whole / "config.json", tmp_path)
    tensors = load_file(whole / "model.safetensors")
    save_file(tensors | {name: torch.ones(shape)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = ModelSource.resolve(str(tmp_path))
    with pytest.raises(ModelError) as caught:
        HostStage.load(source, assignment_of(source), EXACT, shard=Shard(1, 2))
    assert str(tmp_path / "model.safetensors") in caught.value.message
    assert name in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("kind", "quantise"),
    [
        # The next has such linears too, and experts besides.
        pytest.param("tied", mlx(4, 32), marks=pytest.mark.long),
        *(("qwen3_moe", mlx(4, 32)), ("gpt_oss", mlx_gpt_oss), ("gpt_oss", mxfp4), ("llama", fp8((32, 32)))),
    ],
    ids=["mlx", "mlx moe", "mlx gpt_oss", "mxfp4", "fp8"],
)
def test_a_quantised_checkpoint_is_sliced_at_the_borders_of_its_blocks(
    tmp_path: Path, prompt: Prompt, kind: str, quantise: Quantise
) -> None:
    written = write(tmp_path, kind, quantise)
    sources = [ModelSource.resolve(str(path)) for path in (written.quantised, written.dense)]
    found, dense = (chain_of(RankStages(ranks_of(source, 2))).run((0, prompt(40)))[0] for source in sources)
    assert torch.equal(found, dense)


@pytest.mark.skipif(not keeps_stored(), reason="nothing is compiled here, so all is unpacked")
def test_ranks_that_would_cut_a_block_are_refused_by_file_and_tensor(tmp_path: Path) -> None:
    source = ModelSource.resolve(str(write(tmp_path, "llama", fp8((128, 128))).quantised))
    with pytest.raises(
        ModelError, match=r"model\.safetensors: .*down_proj\.weight.*inputs 0 to 96"
    ) as caught:
        ranks_of(source, 2)
    assert "blocks have 128 inputs" in caught.value.message


def test_the_experts_of_others_are_not_read(models: Models) -> None:
    source = models.source("qwen3_moe")
    split, whole = (
        HostStage.load(source, assignment_of(source), EXACT, shard=Shard(0, 2, experts))
        for experts in ("split", "whole")
    )
    assert whole.bytes_read == split.bytes_read
    assert whole.weight_bytes == split.weight_bytes
