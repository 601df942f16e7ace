"""Every family against the whole model of transformers, and split against unsplit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from convoy.errors import ModelError, SelfCheckError, StepError
from convoy.model.backends.host.checks.selfcheck import check_rows
from convoy.model.backends.host.stage import HostStage
from convoy.model.stage import StageOptions
from convoy.plan.spec.registry import FAMILIES
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step
from support.cases import cases
from support.tiny_models import Chain, Models, Prompt

TOLERANCE = 2e-5
KINDS = [
    "phi3",
    "phi4",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5 nested",
    "qwen3_5_moe",
    "gemma2",
    "gemma3",
    "gemma3 capped",
    "gemma3 nested",
    "gpt_oss",
    "gemma4",
    "gemma4 e",
    "deepseek_v3",
    "deepseek_v3 flat",
    "deepseek_v4",
]
# Variants of a family, which are compared in `make test-long`.
VARIANTS = ("phi4", "qwen3_5 nested", "gemma3 capped", "gemma3 nested", "deepseek_v3 flat")
DISTINCT = cases(KINDS, lambda kind: kind not in VARIANTS)
# One of each kind of attention. `make test-verify` and `make test-long` make every cut of each family.
ATTENTIONS = ("phi3", "qwen3_5", "gpt_oss", "gemma4 e", "deepseek_v3")
AS_THEY_ARE = sorted(kind for kind in FAMILIES if FAMILIES[kind].counted)


def allowed_cuts(models: Models, kind: str) -> list[int]:
    spec = models.source(kind).spec
    return [cut for cut in range(1, spec.num_layers) if cut not in spec.forbidden_cuts]


def two_cuts(models: Models, kind: str) -> tuple[int, ...]:
    """Return the cuts of the three stages, or two, that several tests share."""
    cuts = allowed_cuts(models, kind)
    return tuple(cuts[1:3] or cuts[:1])


def in_chunks(chain: Chain, sequence: int, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Return logits of a prompt fed in chunks of these sizes, in turn."""
    parts: list[torch.Tensor] = []
    start = 0
    for size in itertools.cycle(sizes):
        if start >= len(tokens):
            return torch.cat(parts)
        parts += chain.run((sequence, tokens[start : start + size]))
        start += size
    raise AssertionError


# Plain linears are compared with the library below too, split and in chunks.
@pytest.mark.parametrize("kernel", cases(["exact-f32", "plain-f32"], "exact-f32".__eq__))
@pytest.mark.parametrize("kind", DISTINCT)
def test_an_unsplit_stage_gives_the_librarys_logits(
    models: Models, prompt: Prompt, kind: str, kernel: str
) -> None:
    tokens = prompt(200)
    (found,) = models.chain(kind, kernel=kernel).run((0, tokens))
    # logits that say something
    assert models.reference(kind, tokens).abs().max() > 0.5
    assert models.distance(kind, tokens, found, allowed=TOLERANCE) <= TOLERANCE


@pytest.mark.parametrize("kind", cases(KINDS, ATTENTIONS.__contains__))
def test_no_cut_chunk_or_neighbour_changes_a_bit(models: Models, prompt: Prompt, kind: str) -> None:
    prompts = {0: prompt(130), 1: prompt(7, seed=1), 2: prompt(61, seed=2)}
    whole = {s: models.chain(kind).run((s, tokens))[0] for s, tokens in prompts.items()}
    for cut in [(), two_cuts(models, kind)]:
        chain = models.chain(kind, *cut)
        first = chain.run((0, prompts[0][:50]), (1, prompts[1]), (2, prompts[2][:60]))
        second = chain.run((2, prompts[2][60:]), (0, prompts[0][50:]))
        assert torch.equal(torch.cat((first[0], second[1])), whole[0]), f"cut at {cut}"
        assert torch.equal(first[1], whole[1]), f"cut at {cut}"
        assert torch.equal(torch.cat((first[2], second[0])), whole[2]), f"cut at {cut}"
    decoded = in_chunks(chain, 3, prompts[0][:68], [64, *[1] * 4])
    assert torch.equal(decoded, whole[0][:68])


@pytest.mark.parametrize("kind", cases(KINDS, ("qwen3_moe", "gemma3", "gpt_oss").__contains__))
def test_plain_stages_split_and_chunked_stay_within_rounding(
    models: Models, prompt: Prompt, kind: str
) -> None:
    tokens = prompt(100)
    chain = models.chain(kind, *two_cuts(models, kind), kernel="plain-f32")
    found = in_chunks(chain, 0, tokens, [50, 1, 49])
    assert models.distance(kind, tokens, found, allowed=TOLERANCE) <= TOLERANCE


@pytest.mark.parametrize("kind", AS_THEY_ARE)
@pytest.mark.long
def test_a_decoder_that_fits_runs_as_it_is(models: Models, prompt: Prompt, kind: str) -> None:
    tokens = prompt(90)
    assert models.reference(kind, tokens).abs().max() > 0.2
    (whole,) = models.chain(kind).run((0, tokens))
    assert models.distance(kind, tokens, whole, allowed=TOLERANCE) <= TOLERANCE
    split = in_chunks(models.chain(kind, 2), 0, tokens, [40, 1, 49])
    assert torch.equal(split, whole)
    plain = in_chunks(models.chain(kind, 1, kernel="plain-f32"), 0, tokens, [50, 1, 39])
    assert models.distance(kind, tokens, plain, allowed=TOLERANCE) <= TOLERANCE


@pytest.mark.parametrize("kind", DISTINCT)
def test_a_stage_reads_and_holds_what_the_plan_says(models: Models, kind: str) -> None:
    spec = models.source(kind).spec
    (whole,) = models.chain(kind).stages
    # What a part adds to the bytes depends on no kernel.
    if kind in ATTENTIONS:
        parts = models.chain(kind, *two_cuts(models, kind)).stages
    else:
        last = StageAssignment("b", allowed_cuts(models, kind)[-1], spec.num_layers, False, True)
        parts = [HostStage.load(models.source(kind), last, StageOptions())]
    for stage in (whole, *parts):
        mine = stage.assignment
        ends = {"embed": mine.embed, "output": mine.output}
        assert stage.bytes_read == spec.weight_bytes(mine.start, mine.end, **ends, dtype="float32")
        assert stage.weight_bytes == spec.weight_bytes(mine.start, mine.end, **ends, dtype="exact-f32")


@pytest.mark.parametrize("kind", cases(KINDS, ("qwen3_moe", "deepseek_v3").__contains__))
def test_plain_linears_take_what_the_plan_says(models: Models, kind: str) -> None:
    (stage,) = models.chain(kind, kernel="plain-f32").stages
    num_layers = models.source(kind).spec.num_layers
    planned = models.source(kind).spec.weight_bytes(0, num_layers, embed=True, output=True, dtype="plain-f32")
    assert stage.weight_bytes == planned


def test_layers_whose_rows_feel_each_other_are_refused_with_what_to_do() -> None:
    def moody(hidden: torch.Tensor, _tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
        return hidden * (1 + 2.0**-23 * (17 in chunks))

    with pytest.raises(SelfCheckError, match="running the layers in chunks") as caught:
        check_rows(moody, 40, 105)
    assert caught.value.hint is not None
    assert 'kernel = "plain-f32"' in caught.value.hint


def test_layers_with_other_heads_than_planned_are_refused_with_both(models: Models) -> None:
    source = models.source("mixtral")
    (group,) = source.spec.cache_groups
    spec = replace(source.spec, cache_groups=(replace(group, head_dim=16, value_dim=16),))
    with pytest.raises(ModelError, match="layer 0 has heads of 12, 2 to a K/V head, expected 16 and 2"):
        HostStage.load(replace(source, spec=spec), StageAssignment("a", 0, 1, False, False), StageOptions())


def test_layers_that_take_token_ids_are_not_run_without(models: Models) -> None:
    source = models.source("gemma4 e")
    stage = HostStage.load(source, StageAssignment("a", 1, 2, False, False), StageOptions(require_tags=False))
    stage.make_pools(4)
    step = Step(0, [], [BlockGrant.append(0, group, [0]) for group in range(2)], [Row(0, 0, 3, 0)], b"")
    assert stage.takes_tokens
    with pytest.raises(StepError, match="no tokens"):
        stage.run(step, torch.zeros(3, source.spec.hidden_size), None)
    assert stage.run(step, torch.zeros(3, source.spec.hidden_size), torch.arange(3)).shape == (3, 40)
