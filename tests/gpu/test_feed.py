"""A stage that takes its own samples, and the engine over it, against one that waits for the host."""

from __future__ import annotations

import pytest
import torch

from support.kernels import why_not

if why_not() is not None:
    pytest.skip(why_not() or "", allow_module_level=True)

from convoy.engine.completion import generate
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.local import LocalExecutor
from convoy.engine.scheduler import GroupLimits, SchedulerLimits
from convoy.model.backends.cuda.options import KERNEL
from convoy.model.backends.cuda.sampling import feed
from convoy.model.backends.registry import load_stage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.output_rows import GREEDY
from convoy.model.sampling.params import SamplingParams
from convoy.model.stage import FeedingStage, StageOptions
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

pytestmark = pytest.mark.gpu
PROMPTS = ((5, 6, 7), tuple(range(9, 40)), (3,) * 15)
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=4),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5, logprobs=2),
)


def test_tokens_that_name_samples_become_them_and_others_stay(device: torch.device) -> None:
    samples = torch.tensor([[11, 400, -1, 13], [0, 1, 1, 0]], dtype=torch.int32, device=device)
    tokens = torch.tensor([7, -1, -4, -2, -3, -99, 8], dtype=torch.int32, device=device)
    feed(tokens, samples, 100)
    # What is no token of the vocabulary, or no sample, becomes 0.
    assert tokens.tolist() == [7, 11, 13, 0, 0, 0, 8]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_fed_text_is_the_one_that_waits_for_the_host(block_size: int) -> None:
    source = ModelSource.resolve("demo-mini")
    whole = StageAssignment("alpha", 0, source.spec.num_layers, embed=True, output=True)
    texts, num_fed = [], []
    for feeds in (True, False):
        stage = load_stage(source, whole, StageOptions(kernel=KERNEL, device="cuda", block_size=block_size))
        num_blocks = 512 // block_size
        stage.make_pools(num_blocks)
        executor = LocalExecutor(stage)
        assert executor.feeds
        if not feeds:
            executor.feeds, executor.depth = False, 1
        limits = SchedulerLimits(groups=(GroupLimits(num_blocks),), block_size=block_size)
        with torch.inference_mode(False):
            engine = Engine(executor, Tokenizer(source), limits, EngineOptions(max_context=256))
            engine.start()
        asked = [
            GenerationRequest(prompt, kind, max_tokens=48, ignore_eos=True)
            for prompt in PROMPTS
            for kind in KINDS
        ]
        # One at a time, because other rows beside a row change its last bits.
        texts.append([tuple(generate(engine, request).token_ids) for request in asked])
        engine.close()
        num_fed.append(engine.scheduler.num_fed)
        stage.give_up()
    assert texts[0] == texts[1]
    # Of 9 texts of 48 tokens, each token but the first few can be fed.
    assert num_fed[0] > 9 * 24
    assert num_fed[1] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_prepared_step_takes_the_samples_of_two_steps_ahead_on_the_device() -> None:
    source = ModelSource.resolve("demo-mini")
    whole = StageAssignment("alpha", 0, source.spec.num_layers, embed=True, output=True)
    stage = load_stage(source, whole, StageOptions(kernel=KERNEL, device="cuda", require_tags=False))
    assert isinstance(stage, FeedingStage)
    prompts = (torch.tensor([5, 6, 7]), torch.tensor([9, 8, 7]))
    found = []
    for feeds in (True, False):
        stage.make_pools(8)
        samples = []
        for number, prompt in enumerate(prompts):
            grants = [BlockGrant.append(number, 0, [1 + number])]
            step = Step(number, [], grants, [Row(number, 0, 3, 1)], b"")
            samples.append(stage.sample(stage.start(step, None, prompt, selects=True).wait(), [GREEDY]))
        step = Step(2, [], [], [Row(1, 3, 1, 1), Row(0, 3, 1, 1)], b"")
        if feeds:
            stage.prepare(step)
            rows = stage.start_fed(step, torch.tensor([-2, -1]), samples, selects=True).wait()
        else:
            known = [one.outcomes()[0].sampled.token_id for one in reversed(samples)]
            rows = stage.start(step, None, torch.tensor(known), selects=True).wait()
        found.append(rows.float().cpu())
    assert torch.equal(*found)
    stage.give_up()
