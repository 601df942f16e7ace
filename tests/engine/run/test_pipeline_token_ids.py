"""Layers that take token ids get them on every stage, wherever the stage stands; other peers get none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from support.cluster import running_cluster
from support.odd_models import make_odd_llama
from support.tiny_models import build_model
from support.waiting import wait_until

REQUEST = GenerationRequest(tuple(range(5, 45)), SamplingParams(temperature=0.0), 8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path: Path = tmp_path_factory.mktemp("models") / "inputs"
    make_odd_llama(path)  # for its tokenizer
    build_model("gemma4 e").save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 104}))
    return ModelSource.resolve(str(path))


@pytest.fixture(scope="module")
def whole(source: ModelSource) -> tuple[int, ...]:
    with running_cluster(source, 1) as cluster:
        return generate(cluster.engine, REQUEST).token_ids


@pytest.mark.parametrize(
    "spans", [{"alpha": "0:0,output", "beta": "1:6"}, {"alpha": "1:output", "beta": "0:0"}]
)
def test_a_split_model_says_what_the_whole_says(
    source: ModelSource, whole: tuple[int, ...], spans: dict[str, str]
) -> None:
    assert source.spec.token_id_layers
    with running_cluster(source, 2, spans=spans) as cluster:
        assert generate(cluster.engine, REQUEST).token_ids == whole


def test_an_empty_step_passes_layers_that_take_token_ids(source: ModelSource) -> None:
    with running_cluster(source, 2, spans={"alpha": "0:0,output", "beta": "1:6"}) as cluster:
        before = cluster.engine.stats().steps
        cluster.engine.wake()
        wait_until(lambda: cluster.engine.stats().steps > before)
        assert cluster.engine.stats().recoveries == 0
