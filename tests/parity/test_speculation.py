"""Guessing ahead changes no token and no bit of a log-probability, on any layout."""

from __future__ import annotations

import queue
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from support.cases import cases
from support.cluster import running_cluster

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SEEDED = SamplingParams(temperature=0.7, top_p=0.95, seed=4, logprobs=2)
PENALIZED = replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2, logit_bias={5: 2.0})
TEXTS = (
    "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The",
    "one two three four five one two three four five one two",
    'Q: How many times does "salt" appear here: salt salt salt salt salt?\nA: 4\nQ: How',
)


def running(
    source: ModelSource, spans: dict[str, str] | None = None, **changes: Any
) -> AbstractContextManager[RunningCluster]:
    """Start as many members as there are spans, over streams in memory."""
    return running_cluster(source, len(spans or "1"), spans=spans, **changes)


def requests_for(source: ModelSource, num_tokens: int = 28) -> list[GenerationRequest]:
    tokenizer = Tokenizer(source)
    return [
        GenerationRequest(
            tuple(tokenizer.encode(text)),
            params,
            num_tokens,
            ignore_eos=params is not SEEDED,
            num_choices=2 if params is SEEDED else 1,
        )
        for text in TEXTS
        for params in (GREEDY, SEEDED, PENALIZED)
    ]


def answers(cluster: RunningCluster, requests: list[GenerationRequest]) -> list[list[Output]]:
    """Ask all at once, so that rows of many share steps."""
    heard: list[queue.SimpleQueue[Output]] = [queue.SimpleQueue() for _ in requests]
    for request, outputs in zip(requests, heard, strict=True):
        cluster.engine.submit(request, outputs.put)
    told = []
    for request, outputs in zip(requests, heard, strict=True):
        found: list[Output] = []
        while sum(isinstance(output, FinishOutput) for output in found) < request.num_choices:
            found.append(outputs.get(timeout=60))
            assert not isinstance(found[-1], ErrorOutput)
        told.append([one for choice in range(2) for one in found if getattr(one, "choice", 0) == choice])
    return told


def of_one_member(source: ModelSource, requests: list[GenerationRequest]) -> list[list[Output]]:
    with running(source) as cluster:
        told = answers(cluster, requests)
        assert cluster.engine.stats().drafted_tokens == 0
        return told


@pytest.fixture(scope="module")
def unguessed(demo: ModelSource) -> list[list[Output]]:
    told = of_one_member(demo, requests_for(demo))
    assert all(one.logprob is not None for outputs in told for one in outputs if isinstance(one, TokenOutput))
    return told


LAYOUTS: dict[str, tuple[dict[str, str] | None, dict[str, Any]]] = {
    "alone": (None, {}),
    "default": ({"alpha": "0:4,output", "beta": "5:11"}, {}),
    "reverse": ({"alpha": "6:output", "beta": "0:5"}, {}),
    "forward": ({"alpha": "0:5", "beta": "6:output"}, {}),
    "three, four steps in flight": (
        {"alpha": "0:3,output", "beta": "4:7", "gamma": "8:11"},
        {"micro_batches": 4, "prefill_chunk": 7},
    ),
    "few blocks": ({"alpha": "0:4,output", "beta": "5:11"}, {"num_blocks": 16}),
}


# Other layouts guess in test_grammar.py too.
@pytest.mark.parametrize("layout", cases(LAYOUTS, "few blocks".__eq__))
def test_guessing_ahead_changes_no_bit(demo: ModelSource, unguessed: list[list[Output]], layout: str) -> None:
    spans, changes = LAYOUTS[layout]
    with running(demo, spans, speculate=8, **changes) as cluster:
        told = answers(cluster, requests_for(demo))
        stats = cluster.engine.stats()
        status = cluster.status()
    assert [[_said(one) for one in outputs] for outputs in told] == [
        [_said(one) for one in outputs] for outputs in unguessed
    ]
    assert 0 < stats.accepted_tokens < stats.drafted_tokens, "some guesses were right, and some wrong"
    assert (stats.preempted > 0) == (layout == "few blocks")
    assert (status.drafted_tokens, status.accepted_tokens) == (stats.drafted_tokens, stats.accepted_tokens)


def test_what_was_said_with_guesses_is_a_prefix_to_share(demo: ModelSource) -> None:
    request = replace(requests_for(demo)[6], max_tokens=60)
    with running(demo, speculate=8) as cluster:
        (first,) = answers(cluster, [request])
        assert cluster.engine.stats().accepted_tokens > 20
        said = [one.token_id for one in first if isinstance(one, TokenOutput)]
        turn = replace(request, prompt_ids=(*request.prompt_ids, *said, 7, 8))
        (found,) = answers(cluster, [turn])
    with running(demo) as cluster:
        (expected,) = answers(cluster, [turn])
    assert [_said(one) for one in found] == [_said(one) for one in expected]
    assert isinstance(found[-1], FinishOutput)
    assert found[-1].cached_tokens == (len(request.prompt_ids) + 59) // 16 * 16


def _said(output: Output) -> Output:
    return replace(output, cached_tokens=0) if isinstance(output, FinishOutput) else output
