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
from convoy.model.backends.host.stage import Stage, StageOptions
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.grid import GridScaled
from convoy.model.checkpoints.source import ModelSource
from convoy.wire.messages.control import StageAssignment
from support.quantised_models import Quantise, State, awq, compressed, fp8, gptq, mlx, mxfp4, write

Damage = Callable[[State, dict[str, Any]], object]
FORMATS: dict[str, tuple[str, Quantise]] = {
    "mlx": ("llama", mlx(4, 64)),
    "mxfp4": ("gpt_oss", mxfp4),
    "fp8": ("llama", fp8((128, 128))),
    "compressed": ("llama", compressed(4, 32, shuffled=True)),
    "gptq": ("llama", gptq(4, 64)),
    "awq": ("llama", awq(32)),
}
DOWN = "model.layers.1.mlp.down_proj"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


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


def load(path: Path) -> Stage:
    source = ModelSource.resolve(str(path))
    return Stage.load(source, StageAssignment("a", 0, source.spec.num_layers, True, True), StageOptions())


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
        ("mlx", everywhere("mode", "nvfp4"), "quantization_config.mode = 'nvfp4', expected affine"),
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
        ("compressed", said("format", "nvfp4-pack-quantized"), "format = 'nvfp4-pack-quantized', expected"),
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
        ("awq", said("version", "gemv"), "version = 'gemv', expected gemm"),
        ("awq", cut(f"{DOWN}.scales"), f"{DOWN}.scales has the shape [5, 128], expected [6, 128]"),
        ("awq", said("quant_method", "bitsandbytes"), "quant_method = 'bitsandbytes', which is not known"),
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
