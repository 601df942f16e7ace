"""Turns behind a cached prefix, in families with windows and states: the bits of turns that run cold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.output_rows import Logits
from parity.test_sessions import running, some_tokens
from support.driver import GREEDY
from support.odd_models import make_odd_llama
from support.tiny_models import build_model

Sources = Callable[[str], ModelSource]
# Each with its cut, and the tokens of a prompt of 205 that the next turn finds.
KINDS = {
    "mistral": (2, 192),
    "gemma3": (3, 192),
    "gemma4": (3, 192),
    "gpt_oss": (2, 192),
    "qwen3_5": (2, 192),
    "deepseek_v4": (2, 192),
}
LAYOUTS = ["alone", "default", "forward"]
QUICK = {("gemma3", "default")}
CASES = [
    pytest.param(kind, layout, marks=[] if (kind, layout) in QUICK else [pytest.mark.long])
    for kind in KINDS
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    known: dict[str, ModelSource] = {}

    def make(kind: str) -> ModelSource:
        if kind not in known:
            directory = tmp_path_factory.mktemp(kind)
            make_odd_llama(directory)  # for its tokenizer
            build_model(kind).save_pretrained(directory)
            known[kind] = ModelSource.resolve(str(directory))
        return known[kind]

    return make


def spans_of(layout: str, cut: int, num_layers: int) -> str | dict[str, str]:
    if layout == "default":
        return {"alpha": f"0:{cut - 1},output", "beta": f"{cut}:{num_layers - 1}"}
    return {"alpha": f"0:{cut - 1}", "beta": f"{cut}:output"} if layout == "forward" else layout


def turn(
    cluster: RunningCluster, tokens: Sequence[int], answer: Sequence[int], salt: bytes | None
) -> tuple[int, list[Logits]]:
    """Run a prompt and an answer; return how many tokens of the prompt ran, and all logits of the answer."""
    with cluster.session(salt=salt) as session:
        num_run = session.sync(tokens)
        told = [session.logits()]
        for token in answer:
            session.eval(token)
            told.append(session.logits())
        return num_run, told


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_turns_behind_a_cached_prefix_have_the_bits_of_turns_run_cold(
    kind: str, layout: str, sources: Sources
) -> None:
    source = sources(kind)
    cut, found = KINDS[kind]
    tokens = some_tokens(source, 300)
    prompt, answer = tokens[:205], tokens[205:225]
    other = [*prompt[:200], *tokens[240:270]]
    longer = [*prompt, *answer, *tokens[270:290]]
    spans = spans_of(layout, cut, source.spec.num_layers)
    with running(source, spans, prefill_chunk=24, max_batch=4, num_blocks=0) as cluster:
        cold = [turn(cluster, one, answer, None) for one in (prompt, other, longer)]
        assert [num_run for num_run, _ in cold] == [len(prompt), len(other), len(longer)]
        warm = [turn(cluster, one, answer, b"a key") for one in (prompt, other, longer, prompt)]
    assert [num_run for num_run, _ in warm[:2]] == [len(prompt), len(other) - found]
    assert warm[2][0] <= len(longer) - found
    assert warm[3][0] <= len(prompt) - found
    for (_, expected), (_, told) in zip([*cold, cold[0]], warm, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(expected, told, strict=True))


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.long)])
@pytest.mark.long
def test_turns_at_once_with_guesses_and_few_blocks_say_what_each_says_alone(
    kind: str, sources: Sources
) -> None:
    source = sources(kind)
    cut, _ = KINDS[kind]
    random = Random(5)
    start = [random.randrange(5, 90) for _ in range(40)] * 3
    prompts = [(*start[: 118 - 3 * i], *range(20 + i, 50 + i), *start[:20]) for i in range(5)]
    asked = [GenerationRequest(one, GREEDY, max_tokens=40, ignore_eos=True) for one in prompts]
    spans = spans_of("default", cut, source.spec.num_layers)
    with running(source, spans, prefill_chunk=24, max_batch=2, num_blocks=0, speculate=8) as cluster:
        cold = [generate(cluster.engine, replace(one, cache_salt=bytes([i]))) for i, one in enumerate(asked)]
    with running(source, spans, prefill_chunk=24, max_batch=4, num_blocks=22, speculate=8) as cluster:
        for _ in range(2):
            told = generate_all(cluster, asked)
            assert told == [list(one.token_ids) for one in cold]
        stats = cluster.engine.stats()
        assert stats.hit_tokens > 0
        assert stats.preempted > 0
        assert stats.drafted_tokens > 0 or not source.spec.can_rewind


def generate_all(cluster: RunningCluster, asked: Sequence[GenerationRequest]) -> list[list[int]]:
    """Run all requests at once."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return [list(one.token_ids) for one in pool.map(partial(generate, cluster.engine), asked)]
