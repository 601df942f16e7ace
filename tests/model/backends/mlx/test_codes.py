"""Codes of other formats in MLX's form: the same values to the bit, and the logits of the unpacked model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.mlx_device import why_no_mlx
from support.mlx_stages import Loader
from support.quantised_models import (
    Quantise,
    Writer,
    awq,
    compressed,
    compressed_powers,
    gptq,
    library_model,
    mlx_floats,
    nvfp4,
    write,
    write_gguf,
)
from support.tiny_models import Chain

if why_no_mlx():
    pytest.skip(f"{why_no_mlx()}: `make test-mlx` installs it", allow_module_level=True)

import gguf
import mlx.core as mx
import numpy as np

from convoy.model.backends.mlx.arrays import to_torch
from convoy.model.backends.mlx.codes import lay_out
from convoy.model.backends.mlx.layers.matrices import CodedMatrix
from convoy.model.checkpoints.formats.mxfp4 import pairs_of_floats
from convoy.model.checkpoints.read_tensor import read_kept, read_tensor
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange

PROMPT = list(range(3, 40))
QUANTISERS: dict[str, Quantise] = {
    "gptq 4 bits": gptq(4, 32),
    "gptq 8 bits": gptq(8, 64),
    "awq": awq(32),
    "compressed 4 bits": compressed(4, 32),
    "compressed 8 bits with zeros": compressed(8, 64, symmetric=False),
    "compressed, a scale for a row": compressed(4, None),
}
SMALL_FLOATS: dict[str, tuple[str, Quantise]] = {
    **{f"mlx {mode}": ("qwen3_moe", mlx_floats(mode)) for mode in ("mxfp4", "mxfp8", "nvfp4")},
    **{f"compressed {mode}": ("llama", compressed_powers(mode)) for mode in ("mxfp4", "mxfp8")},
}


def check_values(one: StoredRange, expected: torch.Tensor) -> None:
    """Check the laid-out values bit by bit, with factors in the two dtypes of stages."""
    for dtype in (mx.float32, mx.bfloat16):
        found = lay_out(one, dtype)
        assert found.biases is not None
        scales, biases = (factor.astype(mx.float32) for factor in (found.scales, found.biases))
        values = mx.dequantize(found.codes, scales, biases, group_size=found.group_size, bits=found.bits)
        assert torch.equal(to_torch(values), expected)


@pytest.mark.parametrize("kind", QUANTISERS)
def test_codes_are_laid_out_without_a_rounding(kind: str, load: Loader, tmp_path: Path) -> None:
    written = write(tmp_path, "llama", QUANTISERS[kind])
    source, dense = (ModelSource.resolve(str(path)) for path in (written.quantised, written.dense))
    name = "model.layers.1.mlp.down_proj.weight"
    matrix = read_kept(source, name)
    assert isinstance(matrix, StoredMatrix)
    (one,) = matrix.ranges
    assert isinstance(one, StoredRange)
    check_values(one, read_tensor(source, name))
    found, expected = (Chain(load(each)).run((0, PROMPT))[0] for each in (source, dense))
    assert float((found - expected).abs().max()) <= 5e-5
    for cut in (1, 2):
        assert torch.equal(Chain(load(source, cut)).run((0, PROMPT))[0], found)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_gguf_file_has_the_logits_of_its_values(kind: str, load: Loader, tmp_path: Path) -> None:
    written = write_gguf(tmp_path, Writer(library_model("llama")), kind)
    source, dense = (ModelSource.resolve(str(path)) for path in (written.quantised, written.dense))
    found, expected = (Chain(load(each)).run((0, PROMPT))[0] for each in (source, dense))
    assert float((found - expected).abs().max()) <= 5e-5


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_blocks_of_ggml_are_laid_out_without_a_rounding(kind: str) -> None:
    generator = np.random.default_rng(3)
    number = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = generator.integers(0, 256, (8, 2, block_bytes), dtype=np.uint8)
    halves = generator.normal(size=(8, 2, 2)).astype(np.float16).view(np.uint8).reshape(8, 2, 4)
    at = 4 if kind in ("Q4_1", "Q4_K") else 2
    blocks[..., :at] = halves[..., :at]
    packed = torch.from_numpy(blocks.reshape(8, -1))
    inputs = 2 * gguf.GGML_QUANT_SIZES[number][0]
    expected = torch.from_numpy(gguf.quants.dequantize(packed.numpy(), number))
    check_values(StoredRange(f"gguf:{kind}", 8, inputs, {"stored": packed}), expected)


@pytest.mark.parametrize("kind", SMALL_FLOATS)
def test_small_floats_stay_as_stored_and_have_the_logits_of_their_values(
    kind: str, load: Loader, tmp_path: Path
) -> None:
    written = write(tmp_path, *SMALL_FLOATS[kind])
    source, dense = (ModelSource.resolve(str(path)) for path in (written.quantised, written.dense))
    (stage,) = stages = load(source)
    found, expected = (Chain(each).run((0, PROMPT))[0] for each in (stages, load(dense)))
    assert float((found - expected).abs().max()) <= 5e-5
    # Codes are not unpacked: norms, and an embedding for float32, are all that takes more than its bytes.
    (rounded,) = load(source, kernel="mlx-bf16")
    assert rounded.weight_bytes <= 1.08 * sum(part.num_bytes for part in source.tensors.values())
    assert stage.weight_bytes < sum(part.num_bytes for part in dense.tensors.values())
    assert torch.equal(Chain(load(source, 1)).run((0, PROMPT))[0], found)


@pytest.mark.parametrize(("mode", "group"), [("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)])
def test_each_code_of_a_small_float_under_each_scale_has_our_value(mode: str, group: int) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    codes = every.repeat(256, 1)
    powers = torch.float8_e4m3fn if mode == "nvfp4" else torch.float8_e8m0fnu
    values = codes.view(torch.float8_e4m3fn).float() if mode == "mxfp8" else pairs_of_floats(codes)
    scales = every[:, None].repeat(1, values.shape[1] // group)
    expected = (values.view(256, -1, group) * scales.view(powers).float()[..., None]).flatten(1)
    words, bytes_ = (mx.array(one.numpy()) for one in (codes, scales))
    found = to_torch(mx.dequantize(words.view(mx.uint32), bytes_, mode=mode, dtype=mx.float32))
    # Stages refuse a scale that is not a number.
    known = ~scales.view(powers).float().isnan().any(1)
    assert int(known.sum()) >= 254
    assert torch.equal(found[known].nan_to_num(7.0), expected[known].nan_to_num(7.0))


@pytest.mark.parametrize(
    ("mode", "group", "bits"),
    [("affine", 64, 4), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)],
)
def test_a_product_of_bfloat16_rows_is_the_exact_sum_rounded_once(mode: str, group: int, bits: int) -> None:
    mx.random.seed(1)
    stack = mx.random.normal((1, 96, 512)).astype(mx.bfloat16)
    codes, scales, *biases = mx.quantize(stack, mode=mode)
    stacked = CodedMatrix(codes, scales, biases[0] if biases else None, group, bits, mode)
    matrix = replace(stacked, codes=codes[0], scales=scales[0], biases=biases[0][0] if biases else None)
    x = mx.random.normal((3, 512)).astype(mx.bfloat16)
    # The values of codes: those of one input at a time, which no sum rounds.
    values = to_torch(matrix.multiply(mx.eye(512, dtype=mx.float32))).double()
    exact = to_torch(x).double() @ values
    chosen = stacked.multiply_chosen(x[:, None, None], mx.zeros((3, 1), mx.uint32))
    for found in (matrix.multiply(x), chosen.reshape(3, -1)):
        # Half a unit in the last of 8 bits, and what float32 rounds in a sum.
        assert bool(((to_torch(found).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all())


def test_a_factor_beside_scales_is_refused_by_name(load: Loader, tmp_path: Path) -> None:
    source = ModelSource.resolve(str(write(tmp_path, "llama", nvfp4("modelopt")).quantised))
    with pytest.raises(ModelError, match=r"proj.weight has a factor beside its scales"):
        load(source)


@pytest.mark.parametrize(("mode", "byte"), [("mxfp8", 0xFF), ("nvfp4", 0x7F), ("nvfp4", 0xFF)])
def test_a_scale_that_is_not_a_number_is_refused_by_its_tensor(
    mode: str, byte: int, load: Loader, tmp_path: Path
) -> None:
    written = write(tmp_path, "llama", mlx_floats(mode)).quantised
    (file,) = written.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.scales"][0, 0] = byte
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers.1.mlp.down_proj.scales holds a scale that is not a number"):
        load(ModelSource.resolve(str(written)))


def test_groups_that_are_no_runs_are_refused_by_name(load: Loader, tmp_path: Path) -> None:
    source = ModelSource.resolve(str(write(tmp_path, "llama", gptq(4, 32, shuffled=True)).quantised))
    with pytest.raises(ModelError, match=r"a form \(TurnedColumns\) that quantized_matmul does not take"):
        load(source)


def test_groups_that_the_settings_call_runs_and_are_none_are_refused_by_name(
    load: Loader, tmp_path: Path
) -> None:
    quantise = gptq(4, 32, shuffled=True)

    def without_order(writer: Writer) -> None:
        quantise(writer)
        writer.config["quantization_config"]["desc_act"] = False

    source = ModelSource.resolve(str(write(tmp_path, "llama", without_order).quantised))
    with pytest.raises(ModelError, match=r"q_proj.weight has groups that are no runs of inputs"):
        load(source)
