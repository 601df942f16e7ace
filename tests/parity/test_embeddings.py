"""The embedding of a prompt is the last hidden state of transformers, whichever members compute it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from convoy.cluster.running import RunningCluster
from convoy.engine.outputs import EmbeddingOutput, ErrorOutput, FinishOutput, Output
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from support.cases import cases
from support.cluster import running_cluster
from support.tiny_models import Models

LAST = ModelSource.resolve("demo-mini").spec.num_layers - 1
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one member": (1, {}),
    "two members": (2, {}),
    "three members": (3, {"spans": {"alpha": "0:0,output", "beta": "1:1", "gamma": f"2:{LAST}"}}),
    "forward": (2, {"spans": {"alpha": "0:0", "beta": f"1:{LAST},output"}}),
    "forward, small chunks, guesses": (
        2,
        {"spans": {"alpha": "0:0", "beta": f"1:{LAST},output"}, "prefill_chunk": 16},
    ),
    "reverse": (2, {"spans": {"alpha": f"1:{LAST},output", "beta": "0:0"}}),
    "two ranks": (2, {"parallel": "tensor"}),
}
FAMILIES = ("odd", "qwen3", "gemma3", "gemma4", "qwen3_5", "deepseek_v3", "deepseek_v4", "gpt_oss")
LENGTHS = (1, 2, 16, 17, 65, 130)
MOST_APART = 1e-6


def prompts(vocab_size: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(7)
    return [tuple(random.integers(0, vocab_size, length).tolist()) for length in LENGTHS]


def embed(cluster: RunningCluster, asked: list[tuple[int, ...]]) -> list[npt.NDArray[np.float32]]:
    """Return the final states, of all prompts at once."""
    heard: list[queue.SimpleQueue[Output]] = []
    for ids in asked:
        heard.append(queue.SimpleQueue())
        request = GenerationRequest(ids, SamplingParams(temperature=0.0), max_tokens=0, embeds=True)
        cluster.engine.submit(request, heard[-1].put)
    found = []
    for outputs in heard:
        first, last = outputs.get(timeout=60), outputs.get(timeout=60)
        assert isinstance(first, EmbeddingOutput), first.error if isinstance(first, ErrorOutput) else first
        assert isinstance(last, FinishOutput)
        assert outputs.empty()
        found.append(first.state)
    return found


def apart(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Return 1 minus the cosine."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def states_of(model: Any, asked: list[tuple[int, ...]]) -> list[npt.NDArray[np.float32]]:
    with torch.no_grad():
        return [model(torch.tensor([list(ids)])).last_hidden_state[0, -1].numpy() for ids in asked]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return ModelSource.resolve("demo-mini")


@pytest.fixture(scope="module")
def expected(source: ModelSource) -> list[npt.NDArray[np.float32]]:
    model: Any = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    return states_of(model.eval().model, prompts(source.spec.vocab_size))


@pytest.fixture(scope="module")
def alone(source: ModelSource) -> list[npt.NDArray[np.float32]]:
    """Return the states of one member."""
    with running_cluster(source, 1) as running:
        return embed(running, prompts(source.spec.vocab_size))


# Of these, another has the same kind of route and more besides.
SLOW = ("two members", "forward", "three members")


@pytest.fixture(scope="module", params=cases(LAYOUTS, lambda one: one not in SLOW))
def cluster(request: pytest.FixtureRequest, source: ModelSource) -> Iterator[RunningCluster]:
    num_members, options = LAYOUTS[request.param]
    with running_cluster(source, num_members, **options) as running:
        yield running


def test_every_split_gives_the_librarys_last_hidden_state(
    cluster: RunningCluster,
    source: ModelSource,
    expected: list[npt.NDArray[np.float32]],
    alone: list[npt.NDArray[np.float32]],
) -> None:
    asked = prompts(source.spec.vocab_size)
    # The second time, the prefix cache has all but the last tokens.
    for _ in range(2):
        found = embed(cluster, asked)
        assert [state.shape for state in found] == [(source.spec.hidden_size,)] * len(asked)
        assert max(map(apart, found, expected)) <= MOST_APART
        # Ranks add partial sums in another order.
        if cluster.status().parallel.mode != "tensor":
            assert all(map(np.array_equal, found, alone))
    stats = cluster.engine.stats()
    assert (stats.running, stats.waiting, stats.generated_tokens) == (0, 0, 0)
    assert stats.recoveries == 0, "no answer of a member was refused"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", cases(FAMILIES, ("odd", "gemma4", "deepseek_v4").__contains__))
def test_every_family_gives_the_librarys_last_hidden_state(models: Models, kind: str, tmp_path: Path) -> None:
    chain = models.chain(kind)
    (stage,) = chain.stages
    tokens = prompts(stage.vocab_size)[3]
    library: Any = AutoModelForCausalLM.from_pretrained(
        models.directory(kind), dtype=torch.float32, attn_implementation="eager"
    )
    (wanted,) = states_of(library.eval().model, [tokens])
    hidden: list[torch.Tensor] = []
    select = stage.select

    def keep(step: Any, found: torch.Tensor) -> torch.Tensor:
        hidden.append(select(step, found))
        return hidden[-1]

    stage.select = keep
    chain.run((1, tokens))
    state = stage.final_state(hidden[0])[-1].numpy()
    assert state.shape == (stage.output_size,)
    assert apart(state, wanted) <= MOST_APART
