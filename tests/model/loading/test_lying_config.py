"""Values of a config.json that are not what they should be: a ModelError each, before anything runs."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from convoy.errors import ModelError, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kv.pool import ApartPool, KvPool
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment, Step
from support.cases import cases
from support.tiny_models import Models

ROPE = {"rope_type": "default", "rope_theta": 1e4}
V4 = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0}


def lie(models: Models, tmp_path: Path, kind: str, changes: dict[str, Any]) -> Path:
    """Copy the model of a kind, with another config.json."""
    base, path = models.directory(kind), tmp_path / "lie"
    path.mkdir()
    shutil.copy(base / "model.safetensors", path)
    config = json.loads((base / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def load(path: Path, kernel: str = "plain-f32") -> HostStage:
    source = ModelSource.resolve(str(path))
    whole = StageAssignment("a", 0, source.spec.num_layers, True, True)
    return HostStage.load(source, whole, StageOptions(kernel=kernel, require_tags=False))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("odd", {"rope_parameters": {**ROPE, "rope_theta": None}}, "rope_parameters.rope_theta = None, exp"),
        ("odd", {"rope_parameters": {**ROPE, "rope_theta": "abc"}}, "rope_parameters.rope_theta = 'abc'"),
        ("odd", {"rope_parameters": {**ROPE, "rope_theta": []}}, "rope_parameters.rope_theta = [], expected"),
        ("odd", {"rope_parameters": {**ROPE, "rope_theta": True}}, "rope_parameters.rope_theta = True"),
        ("odd", {"rope_theta": -1.0}, "rope_theta = -1.0, expected a number above 0 other than 1"),
        ("odd", {"rope_parameters": {**ROPE, "rope_type": []}}, "rope_parameters.rope_type = [], expected a"),
        ("odd", {"rope_parameters": None, "rope_scaling": {"type": {}}}, "rope_scaling.type = {}, expected"),
        ("odd", {"rope_parameters": [1, 2]}, "rope_parameters = [1, 2], expected an object"),
        (
            "odd",
            {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 0}},
            "rope_parameters.factor = 0, expected a number above 0",
        ),
        ("gpt_oss", {"rope_parameters": {**YARN, "rope_theta": 1}}, "rope_parameters.rope_theta = 1, expec"),
        (
            "gpt_oss",
            {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}},
            "rope_parameters.original_max_position_embeddings = 0, expected a number above 0",
        ),
        (
            "qwen3_5",
            {"rope_parameters": {**ROPE, "partial_rotary_factor": None}},
            "rope_parameters.partial_rotary_factor = None, expected a number above 0 and at most 1",
        ),
        (
            "deepseek_v4",
            {"rope_parameters": {"main": V4, "compress": 0}},
            "rope_parameters.compress = 0, expected an object",
        ),
        (
            "deepseek_v4",
            {"rope_parameters": {"main": V4, "compress": {**V4, "rope_type": [1]}}},
            "rope_parameters.compress.rope_type = [1], expected a string",
        ),
        (
            "deepseek_v4",
            {"hc_sinkhorn_iters": 10**9},
            "hc_sinkhorn_iters = 1000000000, expected",
        ),
        ("deepseek_v4", {"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0, expected a number above 0"),
        ("odd", {"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0, expected a number above 0"),
        ("cohere", {"layer_norm_eps": "1e-5"}, "layer_norm_eps = '1e-5', expected a number above 0"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling = 0.0, expected a number above 0"),
        ("odd", {"dtype": ""}, "dtype = '', expected one of bfloat16, float16, float32"),
        ("deepseek_v3", {"n_group": 5}, "n_group = 5, expected a divisor of the 8 experts"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group = 5, expected a whole number from 1 to 4"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_true_is_named_by_the_plan_already(
    models: Models, tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    path = lie(models, tmp_path, kind, changes)
    with pytest.raises(ModelError) as caught:
        ModelSource.resolve(str(path))
    assert f"lie: config.json says {said}" in caught.value.message


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            "odd",
            {"pad_token_id": 10**9},
            "config.json says pad_token_id = 1000000000, expected one of 105 to",
        ),
        ("odd", {"pad_token_id": -106}, "config.json says pad_token_id = -106, expected one of 105 tokens"),
        (
            "odd",
            {"rope_parameters": {**ROPE, "rope_type": "linear"}},
            "config.json is not accepted: KeyError",
        ),
        (
            "odd",
            {"rope_parameters": {**ROPE, "rope_type": "what"}},
            "cannot be built from its config.json: K",
        ),
        ("odd", {"hidden_act": "what"}, "cannot be built from its config.json: KeyError: 'what'"),
        ("deepseek_v3", {"rope_theta": None, "rope_parameters": {"rope_type": "yarn"}}, "config.json"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_the_library_can_make_nothing_of_is_a_wrong_model(
    models: Models, tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load(lie(models, tmp_path, kind, changes))
    assert said in caught.value.message


@pytest.mark.parametrize("kernel", ["plain-f32", "exact-f32"])
def test_layers_that_fit_their_weights_and_cannot_run_are_refused_when_they_are_loaded(
    models: Models, tmp_path: Path, kernel: str
) -> None:
    # as many groups as experts: a group's two best are looked for, and each has one
    path = lie(models, tmp_path, "deepseek_v3", {"n_group": 8})
    said = "lie: layers of type deepseek_v3 do not run as config.json has them: .*selected index k out of"
    with pytest.raises(ModelError, match=said) as caught:
        load(path, kernel)
    assert caught.value.hint is not None


@pytest.mark.parametrize("kernel", cases(["plain-f32", "exact-f32"], "exact-f32".__eq__))
def test_a_trial_leaves_no_pools_behind(models: Models, kernel: str) -> None:
    source = models.source("deepseek_v3")
    before = num_pools()
    parts = ((0, 5, True, True), (1, 3, False, False), (0, 0, True, True))
    stages = [
        HostStage.load(source, StageAssignment("a", *part), StageOptions(kernel=kernel)) for part in parts
    ]
    assert num_pools() == before
    for stage in stages:
        with pytest.raises(StepError, match="before the pools were made"):
            stage.apply(Step(0, [], [], [], b""))


def num_pools() -> int:
    """Return how many pools of keys and values this process holds."""
    gc.collect()
    return sum(type(one) in (KvPool, ApartPool) for one in gc.get_objects())
