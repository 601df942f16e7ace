"""Ranks on MLX: slices of every layer, equal bits over cuts, the whole's results, and refusals by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.config.kernels import KERNELS, ErrorBounds
from convoy.engine.ranks.load import load_member_slice
from convoy.errors import ModelError, PlanError, StepError
from convoy.evaluate.verify import VerifyOptions, verify
from convoy.model.checkpoints.source import ModelSource
from convoy.model.mlx_device import why_no_mlx
from convoy.model.stage import StageOptions
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment, Step
from support.mlx_stages import Loader
from support.quantised_models import Quantise, mlx, mxfp4, write
from support.thread_collective import ThreadGroup
from support.tiny_models import Chain, Models, build_model

if why_no_mlx():
    pytest.skip(f"{why_no_mlx()}: `make test-mlx` installs it", allow_module_level=True)

PROMPT = list(range(3, 40))
STEPS = [((0, PROMPT[:9]), (1, PROMPT[:3])), ((0, PROMPT[9:10]), (1, PROMPT[3:4])), ((0, PROMPT[10:]),)]


def logits(
    source: ModelSource, load: Loader, *cuts: int, kernel: str = "mlx-f32", ranks: int = 2
) -> torch.Tensor:
    """Return the logits of chunks and decodes in mixed steps."""
    rings = [group.ring_blocks(16, 40) for group in source.spec.cache_groups]
    chain = Chain(load(source, *cuts, kernel=kernel, ranks=ranks), rings=rings)
    return torch.cat([row for rows in STEPS for row in chain.run(*rows)])


def ranks_agree_with_one(source: ModelSource, load: Loader) -> None:
    """Check that two ranks have equal bits over a cut in both dtypes, and in float32 one rank's results."""
    for kernel in ("mlx-f32", "mlx-bf16"):
        found = logits(source, load, kernel=kernel)
        assert torch.equal(logits(source, load, 1, kernel=kernel), found)
        if kernel == "mlx-f32":
            one = logits(source, load, kernel=kernel, ranks=1)
            bound = ErrorBounds.grown(KERNELS[kernel].bounds.unsplit, float(one.abs().max()))
            assert 0 < float((found - one).abs().max()) <= bound


# One K/V head for two ranks, windows, sinks, latents, and an MLP beside experts.
@pytest.mark.parametrize("kind", ["mistral", "gemma4", "gpt_oss", "deepseek_v3"])
def test_two_ranks_of_a_family_have_equal_bits_over_a_cut_and_the_results_of_one(
    kind: str, load: Loader, models: Models
) -> None:
    ranks_agree_with_one(models.source(kind), load)


@pytest.mark.parametrize(
    ("kind", "quantise"),
    [("llama", mlx(4, 32)), ("qwen3_moe", mlx(4, 32)), ("gpt_oss", mxfp4)],
    ids=["llama", "qwen3_moe", "gpt_oss"],
)
def test_codes_are_cut_by_outputs_and_by_whole_groups_of_inputs(
    kind: str, quantise: Quantise, load: Loader, tmp_path: Path
) -> None:
    source = ModelSource.resolve(str(write(tmp_path, kind, quantise).quantised))
    ranks_agree_with_one(source, load)
    whole, ranks = (load(source, kernel="mlx-bf16", ranks=count)[0] for count in (1, 2))
    # Norms and routers alone are on both.
    assert whole.weight_bytes < ranks.weight_bytes < 1.1 * whole.weight_bytes


def test_experts_of_a_width_that_does_not_divide_are_shared_out_whole(load: Loader, tmp_path: Path) -> None:
    build_model("qwen3_moe", moe_intermediate_size=23).save_pretrained(tmp_path)
    ranks_agree_with_one(ModelSource.resolve(str(tmp_path)), load)


@pytest.mark.parametrize(("kind", "kernel"), [("llama", "mlx-f32"), ("qwen3", "mlx-bf16")])
def test_ranks_have_a_certificate(kind: str, kernel: str, tmp_path: Path) -> None:
    source = ModelSource.resolve(str(write(tmp_path, kind, mlx(4, 32)).quantised))
    options = VerifyOptions(kernel=kernel, device="mlx", ranks=2, max_cuts=1, num_tokens=2)
    certificate = verify(source, [PROMPT], options)
    assert certificate.passed
    assert certificate.ranks == 2
    bounds = KERNELS[kernel].bounds
    assert certificate.limits.library == (KERNELS[kernel].ranks_library or bounds.library)
    assert certificate.limits.unsplit == bounds.unsplit


def test_ranks_that_would_cut_a_group_are_refused_by_name_before_weights_are_read(
    load: Loader, tmp_path: Path
) -> None:
    source = ModelSource.resolve(str(write(tmp_path, "llama", mlx(4, 64)).quantised))
    for file in source.path.glob("*.safetensors"):
        file.unlink()
    found = r"down_proj\.weight has groups of 64 codes in rows of 192, which 2 ranks would cut"
    with pytest.raises(ModelError, match=found) as refused:
        load(source, ranks=2)
    assert "--ranks" in str(refused.value.hint)


def test_ranks_cannot_share_recurrent_states(load: Loader, models: Models) -> None:
    with pytest.raises(PlanError, match="its layers keep recurrent state"):
        load(models.source("qwen3_5"), ranks=2)


def test_a_rank_alone_is_refused_until_it_joined_and_a_replacement_keeps_its_slice(models: Models) -> None:
    source = models.source("qwen3")
    mine = StageAssignment("a", 0, source.spec.num_layers, embed=True, output=True)
    options = StageOptions(kernel="mlx-f32", device="mlx", require_tags=False)
    first = load_member_slice(source, mine, options, Shard(0, 2))
    first.make_pools(4)
    with pytest.raises(StepError, match="rank 0 of 2 has not joined"):
        first.run(Step(1, [], [], [], b""), None, torch.empty(0, dtype=torch.int64))
    with pytest.raises(ModelError, match="rank 1 of 2 for a stage of rank 0 of 2"):
        first.join(ThreadGroup(2).members[1])
    again = load_member_slice(source, mine, options, Shard(0, 2), before=first)
    assert again.bytes_read < first.bytes_read
    other = load_member_slice(source, mine, options, Shard(1, 2), before=again)
    assert other.bytes_read == first.bytes_read
    other.give_up()
