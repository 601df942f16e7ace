"""Our stage against the whole model of transformers, float32, eager attention."""

from __future__ import annotations

import pytest
import torch
import transformers

from convoy.model.backends.host.stage import HostStage
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step
from support.cases import cases
from support.tiny_models import Models, Prompt

TOLERANCE = 2e-5


@pytest.mark.parametrize("kernel", cases(["exact-f32", "plain-f32"], "exact-f32".__eq__))
@pytest.mark.parametrize("kind", ["odd", "even", "biased", "mistral", "qwen2", "qwen3"])
def test_an_unsplit_stage_gives_the_librarys_logits(
    models: Models, prompt: Prompt, kind: str, kernel: str
) -> None:
    tokens = prompt(200)
    (found,) = models.chain(kind, kernel=kernel).run((0, tokens))
    expected = models.reference(kind, tokens)
    assert expected.abs().max() > 0.5  # logits that say something
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", ["odd", "mistral"])
def test_plain_stages_split_and_chunked_stay_within_rounding(
    models: Models, prompt: Prompt, kind: str
) -> None:
    tokens = prompt(130)
    chain = models.chain(kind, 2, 3, kernel="plain-f32")
    found = torch.cat([chain.run((0, part))[0] for part in (tokens[:50], tokens[50:51], tokens[51:])])
    assert (found - models.reference(kind, tokens)).abs().max() <= TOLERANCE


def test_long_contexts_agree_beyond_one_chunk_of_pairs(models: Models, prompt: Prompt) -> None:
    tokens = prompt(1000)
    (found,) = models.chain("odd").run((0, tokens))
    assert (found - models.reference("odd", tokens)).abs().max() <= TOLERANCE


def test_weights_stored_in_bfloat16_are_computed_in_float32(models: Models, prompt: Prompt) -> None:
    source = models.source("odd", dtype=torch.bfloat16)
    stage = HostStage.load(source, StageAssignment("a", 0, 5, True, True), StageOptions(require_tags=False))
    stage.make_pools(4)
    tokens = prompt(50)
    step = Step(0, [], [BlockGrant.append(0, 0, [3, 1, 2, 0])], [Row(0, 0, 50, 50)], b"")
    found = stage.output(stage.run(step, None, torch.tensor(tokens)))
    model = transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= TOLERANCE
