"""Weights and configurations that are wrong: each names file and tensor, and nothing is ever served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.cluster.options import HeadOptions
from convoy.cluster.running import RunningCluster
from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.network import MemoryNetwork
from support.cluster import MEMBER, NAMES
from support.members import make_local_members, membership_of
from support.odd_models import make_odd_llama

Damage = Callable[[Path], None]
NAME = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_odd_llama(tmp_path_factory.mktemp("model") / "odd")


def cut_short(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def without_a_shard(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors") | {NAME: "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def with_tensor(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        changed = change(tensors.pop(NAME))
        save_file(tensors if changed is None else tensors | {NAME: changed}, directory / "model.safetensors")

    return damage


def with_an_output(directory: Path) -> None:
    """Add an output beside config.json, by which the embedding is the output."""
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    save_file(tensors, directory / "model.safetensors")


def with_config(**changes: object) -> Damage:
    def damage(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            cut_short,
            r"/model\.safetensors is truncated: it has \d+ bytes, .* \d+, the last of them of model\.",
        ),
        (without_a_shard, rf"lacks the shard model-2\.safetensors, which its index names for {NAME}"),
        (with_tensor(lambda _: None), rf"/odd: the checkpoint has no tensor {NAME}"),
        (
            with_tensor(lambda t: t.T.contiguous()),
            rf"/model\.safetensors: {NAME} has shape \[40, 44\], expected",
        ),
        (
            with_tensor(lambda t: t.to(torch.int32)),
            rf"/model\.safetensors: {NAME} has the dtype I32, expected",
        ),
        (
            with_tensor(lambda t: t.to(torch.float8_e5m2)),
            rf"/model\.safetensors: {NAME} has the dtype F8_E5M2",
        ),
        (
            with_an_output,
            r"/model\.safetensors: lm_head\.weight has other values than model\.embed_tokens\.weight, and",
        ),
        (with_config(num_hidden_layers=7), r"the checkpoint has no tensor model\.layers\.5\."),
        (
            with_config(num_hidden_layers=2),
            r"model\.layers\.2\.\S+ is of layer 2, and config\.json says .* 2$",
        ),
        (
            with_config(vocab_size=200),
            r"model\.embed_tokens\.weight has shape \[105, 40\], expected \[200, 40\]",
        ),
        (with_config(num_key_value_heads=5), r"k_proj\.weight has shape \[8, 40\], expected \[40, 40\]"),
        (with_config(rms_norm_eps="small"), r"says rms_norm_eps = 'small', expected a number above 0"),
        (
            with_config(quantization_config={"quant_method": "nibbles"}),
            r"quant_method = 'nibbles', which is not",
        ),
    ],
    ids=lambda value: "" if callable(value) else value[-30:],
)
def test_nothing_is_served_of_a_model_that_is_wrong(
    model: Path, tmp_path: Path, damage: Damage, said: str
) -> None:
    directory = shutil.copytree(model, tmp_path / "odd")
    damage(directory)
    members = make_local_members(NAMES[:1])
    with pytest.raises(ModelError, match=said.replace(NAME, NAME.replace(".", r"\."))):
        RunningCluster.start(
            membership_of(members[0]),
            ModelSource.resolve(str(directory)),
            HeadOptions(MEMBER, num_blocks=8),
            network=MemoryNetwork(),
        )
