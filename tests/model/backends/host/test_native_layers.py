"""Test whole layers in compiled code: equal bits beside any rows, and the parts left to torch."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.model.backends.host import native_layers as layers
from convoy.model.backends.host.checks.layers_check import checked_layers
from convoy.model.backends.host.native_layers import NativeLayers
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import describe_tensors
from convoy.model.kernels.int8 import Int8Linear
from convoy.model.kernels.native import library
from convoy.model.stage import StageOptions
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import StageAssignment
from support.tiny_models import Chain, Threads

CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True, "attention_bias": True},
    "mistral": {"sliding_window": 40},
    "qwen2": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3": {},
}
LENGTHS = (1, 63, 64, 90, 17, 3)

pytestmark = pytest.mark.skipif(
    library.native_library() is None, reason=f"nothing is compiled here: {library.why_no_native()}"
)


def spec_of(family: str, **more: Any) -> tuple[dict[str, Any], ModelSpec]:
    config = {"model_type": family, **CONFIG, **FAMILIES.get(family, {}), **more}
    return config, ModelSpec.from_config(config, family)


def num_native() -> int:
    """Return how many stages of this process have compiled layers."""
    gc.collect()
    return sum(type(one) is NativeLayers for one in gc.get_objects())


def stage_of(family: str, kernel: str = "exact-f32", **more: Any) -> HostStage:
    config, spec = spec_of(family, **more)
    source = ModelSource(family, Path(), config, spec, family, describe_tensors(config, spec), seed=3)
    whole = StageAssignment("alpha", 0, spec.num_layers, embed=True, output=True)
    return HostStage.load(source, whole, StageOptions(kernel=kernel, require_tags=False))


def decoded(stage: HostStage, *batches: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of tokens of sequences of unequal lengths, so many at once."""
    chain = Chain([stage])
    for sequence, length in enumerate(LENGTHS):
        chain.run((sequence, [(7 * i + sequence) % 300 for i in range(length)]))
    return [out for batch in batches for out in chain.run(*((sequence, [sequence]) for sequence in batch))]


def by_parts(
    stage: HostStage, monkeypatch: pytest.MonkeyPatch, *batches: tuple[int, ...]
) -> list[torch.Tensor]:
    with monkeypatch.context() as without:
        without.setattr(NativeLayers, "run", lambda *_: None)
        return decoded(stage, *batches)


@pytest.mark.parametrize("kernel", ["exact-f32", "w8a8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_bits_of_the_parts_alone_and_side_by_side_on_any_threads(
    family: str, kernel: str, monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    stage = stage_of(family, kernel)
    runs: list[bool] = []
    run = NativeLayers.run

    def counted(native: NativeLayers, *given: Any) -> torch.Tensor | None:
        found = run(native, *given)
        runs.append(found is not None)
        return found

    expected = by_parts(stage, monkeypatch, (0,), (1, 2, 3, 4, 5), (3, 0))
    monkeypatch.setattr(NativeLayers, "run", counted)
    for count in (1, 2):
        threads(count)
        runs.clear()
        one_by_one = decoded(stage, *((sequence,) for sequence in (0, 1, 2, 3, 4, 5, 3, 0)))
        assert all(map(torch.equal, expected, one_by_one))
        assert all(map(torch.equal, expected, decoded(stage, (0,), (1, 2, 3, 4, 5), (3, 0))))
        assert runs.count(True) > 0
        # prompts of more than a token, and nothing else, went by parts
        assert runs.count(False) == 2 * sum(length > 1 for length in LENGTHS)


def test_many_rows_and_long_contexts_are_left_to_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of("llama")
    expected = decoded(stage, (1, 2))
    monkeypatch.setattr(NativeLayers, "max_scores", 100)
    assert all(map(torch.equal, expected, decoded(stage, (1, 2))))
    monkeypatch.setattr(layers, "MAX_F32_ROWS", 1)
    assert all(map(torch.equal, expected, decoded(stage, (1, 2))))


@pytest.mark.parametrize(
    "more", [{"hidden_act": "gelu"}, {"head_dim": 8}, {"num_attention_heads": 2, "head_dim": 20}]
)
def test_another_activation_and_other_heads_are_left_to_the_parts(more: dict[str, Any]) -> None:
    before = num_native()
    stage = stage_of("llama", **more)
    assert num_native() == before
    assert len(decoded(stage, (0, 1))) == 2


def test_four_bits_plain_float32_and_other_families_are_left_to_the_parts() -> None:
    before = num_native()
    stages = [
        stage_of("llama", "w4a16"),
        stage_of("llama", "plain-f32"),
        stage_of("phi3", pad_token_id=None),
    ]
    assert num_native() == before
    assert len(stages) == 3


@pytest.mark.parametrize("what", ["eps", "weight", "activation"])
def test_layers_whose_compiled_bits_differ_are_left_to_the_parts(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of("llama")
    modules, groups = stage.modules, spec_of("llama")[1].cache_groups
    assert checked_layers(modules.layers, modules.ropes, groups) is not None
    layer: Any = modules.layers[0]
    if what == "eps":
        monkeypatch.setattr(layer.post_attention_layernorm, "eps", 1e-3)
        found = NativeLayers({0: layer})
        monkeypatch.undo()
        monkeypatch.setattr(
            "convoy.model.backends.host.checks.layers_check.NativeLayers", lambda _layers: found
        )
    elif what == "weight":
        monkeypatch.setattr(layer.mlp.up.native, "described", layer.mlp.gate.native.described)
    else:
        monkeypatch.setattr(layers, "GATED_ACTIVATIONS", {"silu", "gelu"})
        layer.mlp.gate.activation = "gelu"
    assert None is checked_layers(modules.layers, modules.ropes, groups)


def test_a_stage_that_is_over_holds_no_layers() -> None:
    before = num_native()
    stage = stage_of("llama", "w8a8")
    assert num_native() == before + 1
    assert any(isinstance(linear, Int8Linear) for linear in stage.linears)
    stage.give_up()
    assert num_native() == before
