"""Test whole layers in compiled code: the bits of the parts in every family, and the parts left to torch."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.model.backends.host.checks.layers_check import checked_layers
from convoy.model.backends.host.native_layers import NativeLayers
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.native import library
from convoy.model.kernels.stored.linear import StoredLinear
from convoy.model.layers.compiled import NativeExperts
from convoy.model.layers.rope import Rotations
from convoy.model.stage import StageOptions
from convoy.plan.spec.registry import FAMILIES
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.tiny_models import KINDS, Chain, Threads, build_model

# Compiled attention has whole vectors of 16 dimensions.
WIDE = {"hidden_size": 64, "head_dim": 16}
# One kind for each part of a layer's form.
PARTS = [
    "biased",
    "mixed",
    "granite",
    "arcee",
    "apertus",
    "gemma2",
    "cohere2",
    "olmo2",
    "gpt_oss",
    "qwen2_moe",
]
# The same parts put together otherwise.
OTHERS = [
    "phi3",
    "ernie4_5",
    "smollm3",
    "mistral",
    "qwen2",
    "seed_oss",
    "gemma",
    "gemma3",
    "cohere",
    "glm",
    "glm4",
    "olmo3",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
]
# Attention of another kind, with experts in compiled code.
EXPERTS = ["deepseek_v3", "deepseek_v4", "gemma4"]
# Three layers of these do not have every kind of attention.
PATTERNS = ("mixed", "cohere2", "gemma3", "olmo3")
# Every K/V dtype that compiled attention reads, in turn.
KV_DTYPES = ("f32", "bf16", "f16")
# A lone row, two, as many as compiled layers take, and one more.
BATCHES = (1, 2, 18, 19)

pytestmark = pytest.mark.skipif(
    library.native_library() is None, reason=f"nothing is compiled here: {library.why_no_native()}"
)


def stage_of(
    path: Path, kind: str, kernel: str = "exact-f32", kv_dtype: str = "auto", **more: Any
) -> HostStage:
    own: dict[str, Any] = {} if kind in EXPERTS else dict(WIDE)
    if kind not in EXPERTS and kind not in PATTERNS:
        own["num_hidden_layers"] = 3
    build_model(kind, **(own | more)).save_pretrained(path)
    source = ModelSource.resolve(str(path))
    whole = StageAssignment("alpha", 0, source.spec.num_layers, embed=True, output=True)
    return HostStage.load(source, whole, StageOptions(kernel=kernel, require_tags=False, kv_dtype=kv_dtype))


def decoded(stage: HostStage, batches: Sequence[int] = BATCHES) -> list[torch.Tensor]:
    """Return logits of tokens of sequences of unequal lengths, for ``batches`` of sequences."""
    chain = Chain([stage])
    prompts = {s: [(7 * i + s) % 100 for i in range(length(s))] for s in range(max(batches))}
    chain.run(*prompts.items())
    return [
        out for rows in batches for out in chain.run(*((sequence, [sequence]) for sequence in range(rows)))
    ]


def length(sequence: int) -> int:
    return (1, 63, 64, 90, 17, 3)[sequence % 6]


@contextmanager
def compiled_runs(stage: HostStage) -> Iterator[list[int]]:
    """Yield a list of the layers that run in compiled code: their hooks are called without inputs."""
    runs: list[int] = []

    def told(number: int, given: tuple[Any, ...]) -> None:
        if not given:
            runs.append(number)

    hooks = [
        layer.register_forward_hook(lambda _layer, given, _made, number=number: told(number, given))
        for number, layer in stage.layers.items()
    ]
    yield runs
    for hook in hooks:
        hook.remove()


def by_parts(
    stage: HostStage, monkeypatch: pytest.MonkeyPatch, batches: Sequence[int] = BATCHES
) -> list[torch.Tensor]:
    with monkeypatch.context() as without:
        without.setattr(NativeLayers, "can_run", lambda *_: False)
        without.setattr(NativeExperts, "can_run", lambda *_: False)
        return decoded(stage, batches)


CASES = list(zip([*PARTS, *OTHERS], itertools.cycle(KV_DTYPES), strict=False))


@pytest.mark.parametrize(("kind", "kv_dtype"), cases(CASES, lambda case: case[0] in PARTS))
def test_every_layer_of_a_family_has_the_bits_of_its_parts(
    kind: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    stage = stage_of(tmp_path, kind, kv_dtype=kv_dtype)
    expected = by_parts(stage, monkeypatch)
    for count in (1, 2):
        threads(count)
        with compiled_runs(stage) as runs:
            assert all(map(torch.equal, expected, decoded(stage)))
        # Prompts and 19 rows went by parts, and nothing else.
        assert runs == list(stage.layers) * 3


@pytest.mark.parametrize("kind", cases(EXPERTS, "deepseek_v4".__eq__))
def test_experts_have_the_bits_of_one_expert_after_the_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(tmp_path, kind)
    calls: list[int] = []
    can_run = NativeExperts.can_run

    def counted(native: NativeExperts, numbers: torch.Tensor) -> bool:
        calls.append(len(numbers))
        return can_run(native, numbers)

    batches = (1, 2, 5)
    expected = by_parts(stage, monkeypatch, batches)
    monkeypatch.setattr(NativeExperts, "can_run", counted)
    assert all(map(torch.equal, expected, decoded(stage, batches)))
    assert min(calls) <= 5


@pytest.mark.parametrize(
    "kind", cases(["mixed", "olmo2", "arcee", "mixtral"], {"mixed", "olmo2"}.__contains__)
)
def test_rounded_rows_have_the_bits_of_the_parts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(tmp_path, kind, "int8-q8")
    assert any(isinstance(linear, StoredLinear) and linear.is_rounding for linear in stage.linears)
    expected = by_parts(stage, monkeypatch)
    with compiled_runs(stage) as runs:
        assert all(map(torch.equal, expected, decoded(stage)))
    assert runs == list(stage.layers) * 3


def test_every_family_of_plain_layers_has_a_form() -> None:
    without = {kind for kind, family in FAMILIES.items() if family.layer_form is None}
    other_attention = {kind for kind, family in FAMILIES.items() if family.replaced}
    assert without == other_attention | {"gemma4_text"}
    assert {KINDS[kind][0] for kind in (*PARTS, *OTHERS)} >= {"Llama", "GptOss", "Cohere", "Glm4", "Olmo3"}


def test_long_contexts_are_left_to_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(tmp_path, "odd")
    expected = decoded(stage)
    monkeypatch.setattr(NativeLayers, "max_scores", 100)
    with compiled_runs(stage) as runs:
        assert all(map(torch.equal, expected, decoded(stage)))
    assert runs == []


@pytest.mark.parametrize(
    ("kind", "kernel", "more", "why"),
    [
        ("odd", "exact-f32", {"head_dim": 8}, "no attention of its kind"),
        ("olmoe", "exact-f32", {"clip_qkv": 2.0}, "do not clip"),
    ],
)
def test_layers_outside_the_form_run_part_by_part_and_say_so(
    kind: str, kernel: str, more: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "convoy.model.backends.host")
    stage = stage_of(tmp_path, kind, kernel, **more)
    with compiled_runs(stage) as runs:
        decoded(stage)
    assert runs == []
    assert "layer 0 runs part by part: compiled layers" in caplog.text
    assert why in caplog.text


@pytest.mark.parametrize("what", ["eps", "weight"])
def test_layers_whose_compiled_bits_differ_are_left_to_the_parts(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = stage_of(tmp_path, "mixed")
    form = FAMILIES["qwen3"].layer_form
    assert form is not None
    spec = ModelSource.resolve(str(tmp_path)).spec

    def checked() -> NativeLayers | None:
        rotations = Rotations(stage.modules.rotary, spec.max_context)
        return checked_layers(stage.layers, form, stage.modules.ropes, rotations, spec.cache_groups)

    whole = checked()
    assert whole is not None
    assert whole.numbers == stage.layers.keys()
    # The first layer of the windows, which are layers 0, 2 and 3.
    layer: Any = stage.layers[0]
    if what == "eps":
        # What compiled code was told, and not what the module does.
        norm = layer.post_attention_layernorm
        monkeypatch.setattr(
            type(norm),
            "forward",
            lambda one, x: torch.nn.functional.rms_norm(x, x.shape[-1:], one.weight, 0.1),
        )
        assert checked() is None
    else:
        monkeypatch.setattr(layer.mlp.up.native, "described", layer.mlp.gate.native.described)
        found = checked()
        assert found is not None
        assert found.numbers == {1, 4}
    assert "have other bits in compiled code" in caplog.text


def test_a_stage_that_is_over_holds_no_layers(tmp_path: Path) -> None:
    before = num_native()
    stage = stage_of(tmp_path, "odd")
    assert num_native() == before + 1
    stage.give_up()
    assert num_native() == before


def num_native() -> int:
    """Return how many stages of this process have compiled layers."""
    gc.collect()
    return sum(type(one) is NativeLayers for one in gc.get_objects())
