"""The families that MLX runs: every cut gives the whole's bits, and logits are the library's and mlx-lm's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.config.kernels import KERNELS, ErrorBounds
from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.mlx_device import why_no_mlx
from convoy.model.stage import LoadedStage
from convoy.wire.messages.control import Step
from support.mlx_stages import Loader
from support.quantised_models import Quantise, mlx, mxfp4, write
from support.tiny_models import Chain, Models, build_model

if why_no_mlx():
    pytest.skip(f"{why_no_mlx()}: `make test-mlx` installs it", allow_module_level=True)

import mlx.core as mx

PROMPT = list(range(3, 40))
LONG = (PROMPT * 3)[:90]
# Of `support.tiny_models`. Windows are shorter than the prompt.
KINDS = ("gemma", "gemma3 capped", "gemma3 nested", "gemma4", "gpt_oss", "deepseek_v3", "qwen3_5_moe")


def logits(source: ModelSource, load: Loader, *cuts: int, kernel: str) -> torch.Tensor:
    """Return the logits of chunks, and then of decodes beside another sequence."""
    rings = [group.ring_blocks(16, 40) for group in source.spec.cache_groups]
    chain = Chain(load(source, *cuts, kernel=kernel), rings=rings)
    found = chain.run((0, LONG[:40]))
    found += chain.run((0, LONG[40:75]), (1, PROMPT[:1]))
    for place, token in enumerate(LONG[75:]):
        found += chain.run((1, PROMPT[place + 1 : place + 2]), (0, [token]))[::-1]
    return torch.cat([found[0], found[1], *found[3::2]])


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_of_a_family_gives_the_bits_of_the_whole_and_the_library_s_logits(
    kind: str, load: Loader, models: Models
) -> None:
    source = models.source(kind)
    whole = logits(source, load, kernel="mlx-f32")
    for cut in range(1, source.spec.num_layers):
        assert torch.equal(logits(source, load, cut, kernel="mlx-f32"), whole), f"cut at {cut}"
    expected = models.reference(kind, LONG)
    bound = ErrorBounds.grown(KERNELS["mlx-f32"].bounds.library, float(expected.abs().max()))
    assert models.distance(kind, LONG, whole, allowed=bound) <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_in_bfloat16_gives_the_bits_of_the_whole(kind: str, load: Loader, models: Models) -> None:
    source = models.source(kind)
    whole = logits(source, load, kernel="mlx-bf16")
    for cut in (1, source.spec.num_layers - 1):
        assert torch.equal(logits(source, load, cut, kernel="mlx-bf16"), whole), f"cut at {cut}"
    bounds = KERNELS["mlx-bf16"].expert_bounds
    assert bounds is not None
    assert float((whole - models.reference(kind, LONG)).abs().median()) <= bounds.median


@pytest.mark.parametrize("kernel", ["mlx-f32", "mlx-bf16"])
@pytest.mark.parametrize(
    ("kind", "quantise"),
    [
        ("gemma3", mlx(4, 32)),
        ("gemma4", mlx(4, 32)),
        ("qwen3_5_moe", mlx(4, 32)),
        ("deepseek_v3", mlx(4, 32)),
        ("gpt_oss", mxfp4),
    ],
    ids=["gemma3", "gemma4", "qwen3_5_moe", "deepseek_v3", "gpt_oss"],
)
def test_every_cut_of_a_family_in_four_bits_gives_the_bits_of_the_whole(
    kind: str, quantise: Quantise, kernel: str, load: Loader, tmp_path: Path
) -> None:
    written = write(tmp_path, kind, quantise)
    source = ModelSource.resolve(str(written.quantised))
    whole = logits(source, load, kernel=kernel)
    for cut in range(1, source.spec.num_layers):
        assert torch.equal(logits(source, load, cut, kernel=kernel), whole), f"cut at {cut}"
    dense = logits(ModelSource.resolve(str(written.dense)), load, kernel="mlx-f32")
    if kernel == "mlx-f32":
        assert float((whole - dense).abs().max()) <= 5e-5 * max(1.0, float(dense.abs().max()) / 10)
    else:
        assert float((whole - dense).abs().median()) <= 0.15


# What mlx-lm needs beside the tiny models' own settings. It rounds the scale of Gemma's embeddings to
# bfloat16, which the root of 64 does not need.
MLX_LM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"hidden_size": 64},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3},
    ),
    "gemma4": (
        {"hidden_size": 64},
        {"num_kv_shared_layers": 0, "global_head_dim": 16, "num_global_key_value_heads": 1},
    ),
    "deepseek_v3": ({}, {"rope_theta": 1e4}),
    "qwen3_5": ({}, {"model_type": "qwen3_5", "full_attention_interval": 3}),
}


@pytest.mark.parametrize("kind", MLX_LM)
def test_the_logits_of_a_family_are_those_of_mlx_lm(kind: str, load: Loader, tmp_path: Path) -> None:
    options, theirs = MLX_LM[kind]
    build_model(kind, **options).save_pretrained(tmp_path)
    source = ModelSource.resolve(str(tmp_path))
    (found,) = Chain(load(source)).run((0, PROMPT))
    expected = of_mlx_lm(source, theirs, PROMPT)
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()) / 10)


def test_the_logits_of_gpt_oss_in_mxfp4_are_those_of_mlx_lm_with_the_same_codes(
    load: Loader, tmp_path: Path
) -> None:
    # With YaRN, mlx-lm rounds the ends of a ramp between fractions, and the library does not.
    rope = {"rope_type": "default", "rope_theta": 1e4}
    source = ModelSource.resolve(str(write(tmp_path, "gpt_oss", mxfp4, rope_parameters=rope).quantised))
    (found,) = Chain(load(source)).run((0, PROMPT))
    expected = of_mlx_lm(source, {"rope_theta": 1e4}, PROMPT)
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()) / 10)


# The limit for each ten units of logit from mlx-lm's own bfloat16. Seen: 0.11, and 0.29 in 4 bits, where
# MLX's CPU build adds mlx-lm's products in bfloat16.
@pytest.mark.parametrize(
    ("kind", "codes", "limit"),
    [("qwen3", None, 0.15), ("gemma3", None, 0.15), ("llama", mlx(4, 32), 0.35), ("qwen3", mlx(4, 32), 0.35)],
    ids=["qwen3", "gemma3", "llama 4 bits", "qwen3 4 bits"],
)
def test_the_logits_in_bfloat16_are_near_those_of_mlx_lm_in_bfloat16(
    kind: str, codes: Quantise | None, limit: float, load: Loader, tmp_path: Path
) -> None:
    options, theirs = MLX_LM.get(kind, ({}, {"rope_theta": 1e4, "num_experts": 0}))
    if codes is None:
        build_model(kind, **options).save_pretrained(tmp_path)
        source = ModelSource.resolve(str(tmp_path))
    else:
        source = ModelSource.resolve(str(write(tmp_path, kind, codes).quantised))
    (found,) = Chain(load(source, kernel="mlx-bf16")).run((0, PROMPT))
    expected = of_mlx_lm(source, theirs, PROMPT, mx.bfloat16)
    assert float((found - expected).abs().max()) <= limit * max(1.0, float(expected.abs().max()) / 10)


def of_mlx_lm(
    source: ModelSource, settings: Mapping[str, Any], tokens: list[int], dtype: mx.Dtype = mx.float32
) -> torch.Tensor:
    load_model = pytest.importorskip("mlx_lm.utils", reason="`make test-mlx` installs mlx-lm").load_model
    model, _ = load_model(source.path, model_config=dict(settings))
    model.set_dtype(dtype)
    return torch.tensor(model(mx.array([tokens]))[0].astype(mx.float32).tolist())


def test_qwen3_5_as_mlx_lm_converts_it_has_the_same_logits(load: Loader, tmp_path: Path) -> None:
    build_model("qwen3_5").save_pretrained(tmp_path / "theirs")
    shutil.copytree(tmp_path / "theirs", tmp_path / "converted")
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    for name, tensor in state.items():
        if name.endswith("conv1d.weight"):
            state[name] = tensor.transpose(1, 2).contiguous()
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            state[name] = tensor + 1
    save_file(state, tmp_path / "converted" / "model.safetensors", metadata={"format": "mlx"})
    expected, found = (
        Chain(load(ModelSource.resolve(str(tmp_path / name)))).run((0, PROMPT))[0]
        for name in ("theirs", "converted")
    )
    assert torch.equal(expected, found)


def test_layers_with_inputs_from_token_ids_are_refused_by_name(load: Loader, models: Models) -> None:
    with pytest.raises(ModelError, match="its layers have inputs of their own, from token ids"):
        load(models.source("gemma4 e"))


class Spoiling:
    """Stand for a stage of another member, whose results are no numbers while it is ``broken``."""

    def __init__(self, stage: LoadedStage) -> None:
        self._stage = stage
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        found = self._stage.run(step, hidden, tokens)
        return torch.full_like(found, torch.nan) if self.broken else found


def test_a_sequence_begins_without_the_state_that_another_left_in_its_slot(
    load: Loader, models: Models
) -> None:
    source = models.source("qwen3_5_moe")
    before, after = load(source, 1)
    first = Spoiling(before)
    # A slot is the one block of a ring, and the one released last is granted next.
    chain = Chain([first, after], rings=[group.ring_blocks(16, 40) for group in source.spec.cache_groups])
    (expected,) = chain.run((0, PROMPT))
    chain.release(0)
    first.broken = True
    chain.run((1, PROMPT))
    chain.release(1)
    first.broken = False
    (found,) = chain.run((2, PROMPT))
    assert torch.equal(found, expected)


def test_a_bound_of_the_scores_of_attention_is_refused_by_name(load: Loader, tmp_path: Path) -> None:
    build_model("gemma3", attn_logit_softcapping=3.0).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"have a bound \(attn_logit_softcapping\)"):
        load(ModelSource.resolve(str(tmp_path)))
