"""Quantised checkpoints that are damaged, or lie: refused by file, tensor or key, before anything runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.errors import ModelError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.grid import GridScaled
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.quantised_models import (
    Quantise,
    State,
    awq,
    compressed,
    deepseek_v4,
    fp8,
    gptq,
    mlx,
    mlx_gpt_oss,
    mxfp4,
    nf4,
    nvfp4,
    write,
)

Damage = Callable[[State, dict[str, Any]], object]
FORMATS: dict[str, tuple[str, Quantise]] = {
    "mlx": ("llama", mlx(4, 64)),
    "mxfp4": ("gpt_oss", mxfp4),
    "fp8": ("llama", fp8((128, 128))),
    "compressed": ("llama", compressed(4, 32, shuffled=True)),
    "gptq": ("llama", gptq(4, 64)),
    "awq": ("llama", awq(32)),
    "nvfp4": ("llama", nvfp4("modelopt")),
    "nvfp4 compressed": ("llama", nvfp4("compressed")),
    "nf4": ("llama", nf4(double=True)),
    "mlx mxfp4": ("gpt_oss", mlx_gpt_oss),
    "v4": ("deepseek_v4", deepseek_v4),
}
DOWN = "model.layers.1.mlp.down_proj"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
GATE = "model.layers.1.mlp.experts.gate_proj"
V4_DOWN = "model.layers.1.mlp.experts.2.w2"
STATE = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sound")

    def get(form: str) -> Path:
        if not (root / form).exists():
            write(root / form, *FORMATS[form])
        return root / form / "quantised"

    return get


def without(name: str) -> Damage:
    return lambda state, _: [state.pop(name)]


def cast(name: str, dtype: torch.dtype) -> Damage:
    return lambda state, _: state.update({name: state[name].to(dtype)})


def cut(name: str) -> Damage:
    return lambda state, _: state.update({name: state[name][:-1].clone()})


def narrow(name: str, width: int) -> Damage:
    return lambda state, _: state.update({name: state[name][:, :width].clone()})


def state(text: bytes) -> Damage:
    return lambda state, _: state.update({STATE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def emptied(name: str) -> Damage:
    return lambda state, _: state.update({name: state[name][:0].clone()})


def said(key: str, value: object) -> Damage:
    return lambda _, config: config["quantization_config"].update({key: value})


def everywhere(key: str, value: object) -> Damage:
    def change(_: State, config: dict[str, Any]) -> None:
        for place in ("quantization", "quantization_config"):
            config.get(place, {}).update({key: value})

    return change


def damaged(sound: Path, target: Path, damage: Damage) -> Path:
    state = load_file(sound / "model.safetensors")
    config = json.loads((sound / "config.json").read_text())
    damage(state, config)
    target.mkdir()
    save_file(state, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


def load(path: Path) -> HostStage:
    source = ModelSource.resolve(str(path))
    return HostStage.load(source, StageAssignment("a", 0, source.spec.num_layers, True, True), StageOptions())


@pytest.mark.parametrize(
    ("form", "damage", "expected"),
    [
        ("mlx", without(f"{DOWN}.biases"), f"{DOWN}.scales is quantised, and there is no {DOWN}.biases"),
        ("mlx", without(f"{DOWN}.weight"), f"there is no {DOWN}.weight"),
        ("mlx", cast(f"{DOWN}.scales", torch.int32), f"{DOWN}.scales has the dtype I32, expected F32 or"),
        ("mlx", cut(f"{DOWN}.biases"), f"{DOWN}.biases has the shape [127, 3], expected [128, 3]"),
        ("mlx", cut(f"{DOWN}.weight"), f"{DOWN}.weight has the shape [127, 24], expected [128, 24]"),
        ("mlx", everywhere("bits", 7), "quantization_config.bits = 7, expected one of 2, 3, 4, 5, 6, 8"),
        ("mlx", everywhere("bits", 8), "weight has the shape"),
        ("mlx", everywhere("group_size", 48), "has the shape [128, 16], expected [128, 12]"),
        (
            "mlx",
            everywhere("mode", "ternary"),
            "quantization_config.mode = 'ternary', expected affine, mxfp4",
        ),
        ("mlx", everywhere("mode", "nvfp4"), "scales has the dtype BF16, expected U8"),
        ("mlx", everywhere("mode", "mxfp8"), "scales has the dtype BF16, expected U8 or F8_E8M0"),
        ("mxfp4", without(f"{EXPERTS}_scales"), f"there is no {EXPERTS}_scales"),
        ("mxfp4", cut(f"{EXPERTS}_scales"), f"{EXPERTS}_scales has the shape [3, 128, 2], expected [4, 128"),
        ("mxfp4", cast(f"{EXPERTS}_blocks", torch.int32), f"{EXPERTS}_blocks has the dtype I32, expected U8"),
        ("fp8", without(f"{DOWN}.weight_scale_inv"), f"there is no {DOWN}.weight_scale"),
        (
            "fp8",
            said("weight_block_size", [64, 64]),
            "weight_scale_inv has the shape [1, 2], expected [2, 3]",
        ),
        ("fp8", said("weight_block_size", 128), "weight_block_size = 128, expected two whole numbers"),
        ("fp8", emptied(f"{DOWN}.weight"), f"{DOWN}.weight has the shape [0, 192], expected 2 or 3 dim"),
        ("compressed", cut(f"{DOWN}.weight_scale"), f"{DOWN}.weight_scale has the shape [127, 6], expected"),
        ("compressed", said("format", "marlin-24"), "format = 'marlin-24', expected"),
        ("compressed", said("config_groups", {}), "config_groups = {}, expected an object with a group"),
        ("gptq", said("bits", 3), "bits = 3, expected one of 2, 4, 8"),
        ("gptq", said("group_size", 50), "inputs, expected a multiple of the group_size 50"),
        ("gptq", said("group_size", 32), "has the shape"),
        ("gptq", without(f"{DOWN}.qzeros"), f"there is no {DOWN}.qzeros"),
        (
            "gptq",
            said("checkpoint_format", "marlin"),
            "checkpoint_format = 'marlin', expected gptq or gptq_v2",
        ),
        ("gptq", said("dynamic", {"-:.*a": {}, "+:.*b": {"bits": 8}}), "dynamic = {'-:.*a': {}, '+:.*b'"),
        ("gptq", said("dynamic", [1]), "dynamic = [1], expected the same bits and groups"),
        ("awq", said("version", "gemv"), "version = 'gemv', expected gemm"),
        ("awq", cut(f"{DOWN}.scales"), f"{DOWN}.scales has the shape [5, 128], expected [6, 128]"),
        ("awq", said("quant_method", "higgs"), "quant_method = 'higgs', which is not known"),
        ("nvfp4", without(f"{DOWN}.weight_scale_2"), f"there is no {DOWN}.weight_scale_2"),
        ("nvfp4", cut(f"{DOWN}.weight_scale"), f"{DOWN}.weight_scale has the shape [127, 12], expected [128"),
        ("nvfp4", cast(f"{DOWN}.weight_scale", torch.uint8), "has the dtype U8, expected F8_E4M3"),
        ("nvfp4", said("quant_algo", "W4A8_AWQ"), "quant_algo = 'W4A8_AWQ', expected NVFP4 or FP8"),
        ("nvfp4", narrow(f"{DOWN}.weight", 4), f"{DOWN}.weight has rows of 8 numbers, expected a multiple"),
        (
            "nvfp4 compressed",
            without(f"{DOWN}.weight_global_scale"),
            f"there is no {DOWN}.weight_global_scale",
        ),
        ("nvfp4 compressed", cut(f"{DOWN}.weight_packed"), f"{DOWN}.weight_scale has the shape [128, 12]"),
        ("nf4", said("bnb_4bit_quant_type", "fp4"), "bnb_4bit_quant_type = 'fp4', expected nf4"),
        ("nf4", said("load_in_4bit", False), "load_in_4bit = False, expected true"),
        ("nf4", without(f"{DOWN}.weight.absmax"), f"there is no {DOWN}.weight.absmax"),
        ("nf4", cut(f"{DOWN}.weight"), f"{DOWN}.weight has the shape [12287, 1], expected [12288, 1]"),
        ("nf4", cut(f"{DOWN}.weight.absmax"), "absmax has the shape [383], expected [384]"),
        ("nf4", cut(f"{DOWN}.weight.nested_absmax"), "nested_absmax has the shape [1], expected [2]"),
        ("nf4", cut(f"{DOWN}.weight.quant_map"), "quant_map has the shape [15], expected [16]"),
        ("nf4", state(b"[]"), f"{STATE} holds a list, expected an object"),
        ("nf4", state(b"{" * 5000), f"{STATE} has 5000 bytes, expected at most 4096"),
        ("nf4", state(b"[" * 4000), f"{STATE} is not JSON"),
        ("nf4", state(b'{"shape": [1048577, 2]}'), "shape = [1048577, 2], expected the sizes of a matrix"),
        ("nf4", state(b'{"shape": [4, 4], "blocksize": 0}'), "blocksize = 0, expected a whole number"),
        ("mlx mxfp4", cut(f"{EXPERTS}.scales"), f"{EXPERTS}.scales has the shape [3, 128, 2], expected [4"),
        (
            "mlx mxfp4",
            without(f"{GATE}.weight"),
            f"{GATE}.scales is quantised, and there is no {GATE}.weight",
        ),
        ("mlx mxfp4", cut(f"{GATE}.bias"), "cannot make model.layers.1.mlp.experts.gate_up_proj_bias"),
        ("v4", without(f"{V4_DOWN}.scale"), f"{V4_DOWN}.weight has the dtype I8, expected one of"),
        ("v4", cut(f"{V4_DOWN}.scale"), f"{V4_DOWN}.scale has the shape [63, 1], expected [64, 1]"),
        ("v4", narrow(f"{V4_DOWN}.weight", 8), "has rows of 16 numbers, expected a multiple of 32"),
    ],
)
def test_what_does_not_fit_is_refused_from_the_headers_alone(
    sound: Callable[[str], Path], tmp_path: Path, form: str, damage: Damage, expected: str
) -> None:
    path = damaged(sound(form), tmp_path / "damaged", damage)
    with pytest.raises(ModelError, match=re.escape(expected)):
        ModelSource.resolve(str(path))


@pytest.mark.parametrize(
    ("form", "damage", "expected"),
    [
        (
            "gptq",
            lambda state, _: state[f"{DOWN}.g_idx"].fill_(3),
            f"model.safetensors: {DOWN}.g_idx names groups 3 to 3, expected 0 to 2",
        ),
        (
            "compressed",
            lambda state, _: state[f"{DOWN}.weight_g_idx"].fill_(-1),
            f"model.safetensors: {DOWN}.weight_g_idx names groups -1 to -1, expected 0 to 5",
        ),
        (
            "mxfp4",
            lambda state, _: state[f"{EXPERTS}_scales"].fill_(255),
            f"model.safetensors: {EXPERTS}_scales holds a scale that is not a number",
        ),
        (
            "mlx mxfp4",
            lambda state, _: state[f"{EXPERTS}.scales"].fill_(255),
            f"model.safetensors: {EXPERTS}.scales holds a scale that is not a number",
        ),
        (
            "nvfp4",
            lambda state, _: state[f"{DOWN}.weight_scale"].view(torch.uint8).fill_(0x7F),
            f"model.safetensors: {DOWN}.weight_scale holds a scale that is not a number",
        ),
        (
            "nvfp4",
            lambda state, _: state[f"{DOWN}.weight_scale_2"].fill_(float("inf")),
            f"model.safetensors: {DOWN}.weight_scale_2 holds a scale that is not a number",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused_as_they_are_read(
    sound: Callable[[str], Path], tmp_path: Path, form: str, damage: Damage, expected: str
) -> None:
    path = damaged(sound(form), tmp_path / "damaged", damage)
    with pytest.raises(ModelError, match=re.escape(expected)):
        load(path)


def test_a_tile_that_is_said_to_be_far_wider_than_its_matrix_takes_no_memory() -> None:
    stored = StoredTensor("w", Path("f"), "I8", (4, 8), 0, 32)
    scaled = GridScaled("w", (4, 8), {"weight": stored, "scales": stored}, (2, 1 << 50))
    scales = torch.tensor([[1.0], [2.0]])
    ((_, values),) = scaled.pieces({"weight": torch.ones(4, 8, dtype=torch.int8), "scales": scales})
    assert torch.equal(values, scales.repeat_interleave(2, 0).expand(4, 8))


def test_a_truncated_file_of_quantised_weights_is_named(sound: Callable[[str], Path], tmp_path: Path) -> None:
    path = damaged(sound("mlx"), tmp_path / "short", lambda *_: None)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=re.escape(f"{file} is truncated")):
        ModelSource.resolve(str(path))


def test_an_unknown_method_says_what_is_known(sound: Callable[[str], Path], tmp_path: Path) -> None:
    path = damaged(sound("awq"), tmp_path / "odd", said("quant_method", "spqr"))
    with pytest.raises(ModelError, match="spqr") as caught:
        ModelSource.resolve(str(path))
    assert "known: mlx, mxfp4, fp8" in str(caught.value.hint)
