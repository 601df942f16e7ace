"""Ranks that share every layer against the single stage: within rounding of it, and with one bit pattern.

Sums that are split are added in another order than one process adds them, so bits differ from the single
stage's; but not from run to run, nor with chunks or with what runs beside a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.plan.spec.sharding import Experts, Shard
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.thread_collective import RankStages
from support.tiny_models import Chain, Models

TOLERANCE = 1e-4
# Llama with tied ends, Qwen3 with windows, GPT-OSS, Gemma 4 with experts and K = V
FEW = ("odd", "mixed", "gpt_oss", "gemma4")
# Biases, tables by token id, and others with a shape of their own
OTHERS = ("biased", "gemma4 e", "gemma3", "phi3", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("tensor"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # of each rank


def tokens_of(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 105, (count,), generator=generator).tolist()


def ranks_of(
    source: ModelSource,
    world_size: int,
    *cuts: int,
    kernel: str = "exact-f32",
    experts: Experts = "split",
) -> list[Any]:
    """Load stages of so many ranks each, cut before these layers."""
    limits = [0, *cuts, source.spec.num_layers]
    assignments = [
        StageAssignment(f"m{i}", start, limits[i + 1], i == 0, i == len(cuts))
        for i, start in enumerate(limits[:-1])
    ]
    options = StageOptions(kernel=kernel, require_tags=False)
    return [
        RankStages(
            [
                HostStage.load(source, mine, options, shard=Shard(rank, world_size, experts))
                for rank in range(world_size)
            ]
        )
        for mine in assignments
    ]


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check agreement within the tolerance, and the same tokens but for near ties."""
    assert (found - expected).abs().max() <= TOLERANCE
    best = expected.topk(2, dim=-1)
    differs = found.argmax(-1) != best.indices[:, 0]
    assert (best.values[:, 0] - best.values[:, 1])[differs].le(2 * TOLERANCE).all()


def in_pieces(chain: Chain, tokens: Sequence[int]) -> torch.Tensor:
    """Run a chunk, decodes, and a chunk beside other sequences' rows."""
    other = tokens_of(20, seed=3)
    first = chain.run((0, tokens[:30]))[0]
    decoded = [chain.run((0, [token]))[0] for token in tokens[30:33]]
    return torch.cat([first, *decoded, chain.run((7, other), (0, tokens[33:]), (8, other[:1]))[1]])


# Both numbers of ranks, and each way to share a layer. `make test-verify` shares out every family.
QUICK = [("odd", 4), ("gpt_oss", 2), ("gemma4", 2)]


@pytest.mark.parametrize(
    ("kind", "world_size"),
    cases([*itertools.product(FEW, (2, 4)), *((kind, 2) for kind in OTHERS)], QUICK.__contains__),
)
def test_ranks_agree_with_the_single_stage_and_keep_their_bits_in_pieces(
    models: Models, kind: str, world_size: int
) -> None:
    tokens = tokens_of(70)
    (single,) = models.chain(kind).run((0, tokens))
    stages = ranks_of(models.source(kind), world_size)
    (found,) = Chain(stages).run((0, tokens))
    agree(found, single)
    assert torch.equal(in_pieces(Chain(stages), tokens), found)


@pytest.mark.parametrize("kind", cases(FEW, "gemma4".__eq__))
def test_two_stages_of_two_ranks_have_the_bits_of_one(models: Models, kind: str) -> None:
    tokens = tokens_of(40)
    source = models.source(kind)
    (one,) = Chain(ranks_of(source, 2)).run((0, tokens))
    assert torch.equal(Chain(ranks_of(source, 2, 3)).run((0, tokens))[0], one)


@pytest.mark.parametrize("kind", ["odd", "gpt_oss"])
def test_plain_linears_agree_within_rounding_too(models: Models, kind: str) -> None:
    tokens = tokens_of(70)
    (single,) = models.chain(kind, kernel="plain-f32").run((0, tokens))
    stages = ranks_of(models.source(kind), 2, kernel="plain-f32")
    first, again = Chain(stages).run((0, tokens))[0], Chain(stages).run((0, tokens))[0]
    agree(first, single)
    assert torch.equal(first, again)


@pytest.mark.parametrize("kernel", ["int8-q8"])
def test_rounded_ranks_err_as_the_single_stage_does_and_keep_their_bits(models: Models, kernel: str) -> None:
    tokens = tokens_of(70)
    (exact,) = models.chain("even").run((0, tokens))
    (single,) = models.chain("even", kernel=kernel).run((0, tokens))
    stages = ranks_of(models.source("even"), 2, kernel=kernel)
    (found,) = Chain(stages).run((0, tokens))
    assert (found - exact).square().mean() <= 1.5 * (single - exact).square().mean()
    assert torch.equal(in_pieces(Chain(stages), tokens), found)


@pytest.mark.parametrize("kind", cases(["qwen3_moe", "gpt_oss", "mixtral"], "gpt_oss".__eq__))
def test_experts_shared_out_whole_agree_with_the_single_stage(models: Models, kind: str) -> None:
    tokens = tokens_of(70)
    (single,) = models.chain(kind).run((0, tokens))
    stages = ranks_of(models.source(kind), 2, experts="whole")
    (found,) = Chain(stages).run((0, tokens))
    agree(found, single)
    assert torch.equal(in_pieces(Chain(stages), tokens), found)
