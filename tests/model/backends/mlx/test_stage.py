"""A stage on MLX: quantised matrices as stored, mixed steps, rewinds, windows, and mlx-lm's own logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.config.kernels import KERNELS
from convoy.errors import ModelError, PlanError
from convoy.evaluate.verify import VerifyOptions, verify
from convoy.model import mlx_device
from convoy.model.checkpoints.source import ModelSource
from support.mlx_stages import Loader
from support.quantised_models import Quantise, fp8, mlx, write
from support.tiny_models import Chain, Models

if mlx_device.why_no_mlx():
    pytest.skip(f"{mlx_device.why_no_mlx()}: `make test-mlx` installs it", allow_module_level=True)

import mlx.core as mx
import numpy as np
from mlx.nn import Embedding

from convoy.model.backends.mlx.layers.attention import MAX_PADDING, batches_of

PROMPT = list(range(3, 40))


def quantised(root: Path, kind: str, quantise: Quantise) -> ModelSource:
    return ModelSource.resolve(str(write(root, kind, quantise).quantised))


@pytest.mark.parametrize("kernel", ["mlx-f32", "mlx-bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_every_cut_of_four_bits_as_stored_gives_the_bits_of_the_whole(
    kind: str, kernel: str, load: Loader, tmp_path: Path
) -> None:
    source = quantised(tmp_path, kind, mlx(4, 32))
    steps = [((0, PROMPT[:9]), (1, PROMPT[:3])), ((0, PROMPT[9:10]), (1, PROMPT[3:4])), ((0, PROMPT[10:]),)]

    def logits(*cuts: int) -> torch.Tensor:
        chain = Chain(load(source, *cuts, kernel=kernel))
        return torch.cat([row for rows in steps for row in chain.run(*rows)])

    whole = logits()
    for cuts in ((1,), (2,), (1, 2)):
        assert torch.equal(logits(*cuts), whole), f"cut at {cuts}"


@pytest.mark.parametrize("kernel", ["mlx-f32", "mlx-bf16"])
def test_experts_stored_one_by_one_beside_mlps_keep_their_bits_over_every_cut(
    kernel: str, load: Loader, models: Models
) -> None:
    source = models.source("qwen3_moe")

    def logits(*cuts: int) -> torch.Tensor:
        chain = Chain(load(source, *cuts, kernel=kernel))
        rows = [chain.run((0, PROMPT[:30]))[0], *(chain.run((0, [token]))[0] for token in PROMPT[30:])]
        return torch.cat(rows)

    whole = logits()
    for cut in range(1, source.spec.num_layers):
        assert torch.equal(logits(cut), whole), f"cut at {cut}"
    # Rounded to bfloat16, a router of this size chooses other experts at near ties.
    if kernel == "mlx-f32":
        assert models.distance("qwen3_moe", PROMPT, whole, allowed=5e-5) <= 5e-5


def test_a_certificate_of_stacked_experts_in_codes_has_the_limits_of_experts(tmp_path: Path) -> None:
    source = quantised(tmp_path, "qwen3_moe", mlx(4, 32))
    options = VerifyOptions(kernel="mlx-bf16", device="mlx", max_cuts=1, num_tokens=2)
    certificate = verify(source, [PROMPT], options)
    assert certificate.limits == KERNELS["mlx-bf16"].expert_bounds
    assert certificate.passed


def test_codes_stay_as_they_are_stored(load: Loader, tmp_path: Path) -> None:
    source = quantised(tmp_path, "llama", mlx(4, 32))
    (stage,) = load(source, kernel="mlx-bf16")
    stored = sum(tensor.num_bytes for tensor in source.tensors.values())
    assert stage.bytes_read == stored
    # Norms alone, of float32 in the file, take half.
    assert 0.95 * stored <= stage.weight_bytes <= stored


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen3", "qwen3_moe"])
def test_the_logits_are_those_of_mlx_lm_with_the_same_codes(kind: str, load: Loader, tmp_path: Path) -> None:
    load_model = pytest.importorskip("mlx_lm.utils", reason="`make test-mlx` installs mlx-lm").load_model
    source = quantised(tmp_path, kind, mlx(4, 32))
    (found,) = Chain(load(source)).run((0, PROMPT))
    # mlx-lm reads rotations and the number of experts under their older names alone.
    rope = source.config["rope_parameters"]
    assert isinstance(rope, dict)
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": rope if len(rope) > 2 else None}
    older["num_experts"] = source.config.get("num_local_experts", 0)
    model, _ = load_model(source.path, model_config=older)
    looked_up = model.model.embed_tokens
    # Embeddings are rounded once to the dtype of their scales; the rest is float32.
    scales, biases = (one.astype(mx.float32) for one in (looked_up.scales, looked_up.biases))
    codes = {"group_size": looked_up.group_size, "bits": looked_up.bits}
    rounded = mx.dequantize(looked_up.weight, scales, biases, **codes).astype(looked_up.scales.dtype)
    rounded = rounded.astype(mx.float32)
    model.set_dtype(mx.float32)
    model.model.embed_tokens = Embedding(*rounded.shape)
    model.model.embed_tokens.weight = rounded
    expected = torch.tensor(model(mx.array([PROMPT]))[0].tolist())
    # For each ten units of logit.
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()) / 10)


def test_rows_in_one_step_do_not_mix_and_a_rewound_sequence_goes_on_as_before(
    load: Loader, models: Models
) -> None:
    source = models.source("qwen3")
    chain = Chain(load(source, 1))
    other = PROMPT[::-1]
    together = chain.run((0, PROMPT[:20]), (1, other[:7]), (2, PROMPT[:1]))
    apart = [chain.run((number, ids))[0] for number, ids in ((3, PROMPT[:20]), (4, other[:7]))]
    for one, alone in zip(together, apart, strict=False):
        assert float((one - alone).abs().max()) < 2e-5
    (wrong, after) = chain.run((0, other[20:23]), (1, other[7:8]))
    chain.lengths[0] = 20
    # Decodes of 21, 9 and 2 positions, which share calls only where padding costs little.
    again, second, third = chain.run((0, PROMPT[20:21]), (1, other[8:9]), (2, PROMPT[1:2]))
    (expected,) = chain.run((5, PROMPT[:21]))
    assert float((again[-1] - expected[-1]).abs().max()) < 2e-5
    assert not torch.equal(wrong[0], again[0])
    assert after.shape == second.shape == third.shape


def test_a_window_looks_back_no_further_than_the_library(load: Loader, models: Models) -> None:
    source = models.source("mistral")
    assert source.spec.cache_groups[0].window is not None
    chain = Chain(load(source), rings=[group.ring_blocks(16, 16) for group in source.spec.cache_groups])
    ids = (PROMPT * 3)[:90]
    found = torch.cat([chain.run((0, ids[at : at + 15]))[0] for at in range(0, 75, 15)])
    found = torch.cat([found, *(chain.run((0, [token]))[0] for token in ids[75:])])
    assert models.distance("mistral", ids, found, allowed=1e-4) <= 1e-4


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ((90, 100, 10), [[100, 90], [10]]),
        ((80, 100), [[100, 80]]),
        ((60, 100), [[100], [60]]),
        ((5,) * 65, [[5] * 64, [5]]),
    ],
)
def test_decodes_share_a_call_where_padding_adds_less_than_a_quarter_of_their_keys(
    lengths: tuple[int, ...], batches: list[list[int]]
) -> None:
    assert MAX_PADDING == 0.25
    decodes = [(place, np.arange(length, dtype=np.int32)) for place, length in enumerate(lengths)]
    assert [[len(slots) for _, slots in batch] for batch in batches_of(decodes)] == batches


@pytest.mark.parametrize(("num_rows", "every_layer"), [(64, False), (65, True)])
def test_a_step_of_many_rows_is_cut_into_one_evaluation_for_each_layer(
    num_rows: int, every_layer: bool, load: Loader, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.source("qwen3")
    (stage,) = load(source)
    chain = Chain([stage])
    evaluate, cuts = mx.eval, []

    def count(*arrays: mx.array) -> None:
        cuts.append(arrays)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", count)
    (found,) = chain.run((0, (PROMPT * 2)[:num_rows]))
    assert len(cuts) == (source.spec.num_layers if every_layer else 0)
    assert models.distance("qwen3", (PROMPT * 2)[:num_rows], found, allowed=5e-5) <= 5e-5


def test_a_form_that_mlx_does_not_multiply_is_refused_by_name_before_weights_are_read(
    load: Loader, tmp_path: Path
) -> None:
    source = quantised(tmp_path, "llama", fp8((128, 128)))
    for file in source.path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match=r"a form \(F8_E4M3\) that quantized_matmul does not take"):
        load(source)


def test_a_family_without_support_is_refused_by_name(load: Loader, models: Models) -> None:
    with pytest.raises(ModelError, match="model type phi3 has other layers than"):
        load(models.source("phi3"))


def test_a_machine_with_too_little_memory_refuses_before_weights_are_read(
    load: Loader, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.source("qwen3")
    monkeypatch.setattr("convoy.model.backends.mlx.stage.memory_bytes", lambda: 1000)
    with pytest.raises(PlanError, match=r"take \d+ bytes, and MLX may use 1000 on this machine"):
        load(source)


def test_a_stage_asks_for_the_wired_limit_and_runs_without_it_after_a_warning(
    load: Loader, models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "Metal refused a wired limit"
    monkeypatch.setattr("convoy.model.backends.mlx.stage.set_wired_limit", lambda: reason)
    assert load(models.source("qwen3"))
    assert reason in caplog.text
