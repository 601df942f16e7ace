"""What clients ask, on every layout: tokens, texts, log-probabilities and reasons are those of one member, to
the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from support.cases import cases
from support.cluster import running_cluster

WAIT_S = 60.0
VOCAB = 2048
GREEDY = SamplingParams(temperature=0.0)
LAYOUTS: dict[str, Mapping[str, str]] = {
    "default of 2": {"alpha": "0:6,output", "beta": "7:11"},
    "reverse of 2": {"alpha": "4:output", "beta": "0:3"},
    "forward of 2": {"alpha": "0:4", "beta": "5:output"},
    "default of 3": {"alpha": "0:2,output", "beta": "3:8", "gamma": "9:11"},
    "reverse of 3": {"alpha": "9:output", "beta": "4:8", "gamma": "0:3"},
    "forward of 3": {"alpha": "0:2", "beta": "3:8", "gamma": "9:output"},
}
# steps are fed where nothing is guessed
FED: dict[str, Any] = {"speculate": 0, "jump_forward": False}
# how much runs at once: none of it may show
PACES: tuple[dict[str, Any], ...] = (
    {},
    {"prefill_chunk": 7, "prefill_window": 5},
    {"prefill_chunk": 32, "micro_batches": 4, "max_step_tokens": 50, **FED},
    {"prefill_chunk": 1, "max_batch": 3, **FED},
    {"prefill_chunk": 48, "micro_batches": 1, "level_chunks": False},
    {"prefill_chunk": 16, "prefill_window": 3, "max_batch": 1, "num_blocks": 32, **FED},
)
RULES: dict[str, Any] = {
    "min_tokens": 9,
    "stop_token_ids": frozenset(range(5, VOCAB, 9)),
    "bad_words": tuple((token,) for token in range(100, 220)) + tuple((token, 7) for token in range(90)),
}


def requests(vocab_size: int) -> list[GenerationRequest]:
    """Make one of everything that a request can ask for."""
    random = np.random.default_rng(11)
    prompts = [tuple(random.integers(3, vocab_size, size).tolist()) for size in (1, 17, 40, 90, 130, 33)]
    seeded = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=4)
    penalties = replace(seeded, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.7)
    biased = replace(GREEDY, logit_bias={5: 100.0, 9: -3.0}, logprobs=2)
    return [
        GenerationRequest(prompts[0], GREEDY, 12, ignore_eos=True),
        GenerationRequest(prompts[1], seeded, 12, ignore_eos=True),
        GenerationRequest(prompts[2], penalties, 16, ignore_eos=True),
        GenerationRequest(prompts[3], replace(GREEDY, logprobs=5), 8),
        GenerationRequest(prompts[4], replace(seeded, logprobs=0), 6, prompt_logprobs=3, ignore_eos=True),
        GenerationRequest(prompts[5], seeded, 10, num_choices=3, ignore_eos=True, prompt_logprobs=0),
        GenerationRequest(prompts[1][:8], biased, 5, ignore_eos=True),
        GenerationRequest(prompts[3], SamplingParams(seed=8), 30, stop=("e", "a"), ignore_eos=True),
        GenerationRequest(prompts[4] + prompts[3], replace(penalties, temperature=0.0), 10, ignore_eos=True),
        GenerationRequest(prompts[1], replace(seeded, temperature=2.0), 24, num_choices=2, **RULES),
        GenerationRequest(prompts[2], GREEDY, 12, min_tokens=8, allowed_token_ids=tuple(range(0, VOCAB, 3))),
    ]


def answers(cluster: RunningCluster) -> list[dict[str, list[Output]]]:
    """Return each request's outputs, by kind and choice: no order between choices is promised."""
    asked = requests(cluster.tokenizer.vocab_size)
    told: list[list[Output]] = [[] for _ in asked]
    done = [threading.Event() for _ in asked]

    def listen(index: int, request: GenerationRequest) -> None:
        def on_output(output: Output) -> None:
            told[index].append(output)
            ends = sum(isinstance(one, FinishOutput) for one in told[index])
            if isinstance(output, ErrorOutput) or ends == request.num_choices:
                done[index].set()

        cluster.engine.submit(request, on_output)

    for index, request in enumerate(asked):
        listen(index, request)
    assert all(event.wait(WAIT_S) for event in done)
    return [sorted_out(outputs) for outputs in told]


def sorted_out(outputs: list[Output]) -> dict[str, list[Output]]:
    found: dict[str, list[Output]] = {}
    for output in outputs:
        assert not isinstance(output, ErrorOutput), output
        if isinstance(output, FinishOutput):
            output = replace(output, cached_tokens=0)  # depends on earlier requests  # noqa: PLW2901
        found.setdefault(f"{type(output).__name__} {getattr(output, 'choice', '')}", []).append(output)
    return found


@pytest.fixture(scope="module")
def expected(demo: ModelSource) -> Iterator[list[dict[str, list[Output]]]]:
    with running_cluster(demo, 1, max_batch=1) as cluster:
        yield answers(cluster)


def test_the_rules_of_requests_show_in_their_answers(expected: list[dict[str, list[Output]]]) -> None:
    for choice in (0, 1):
        said = [one.token_id for one in expected[-2][f"TokenOutput {choice}"] if isinstance(one, TokenOutput)]
        assert len(said) >= RULES["min_tokens"]
        assert not RULES["stop_token_ids"] & set(said)
        assert not set(range(100, 220)) & set(said)
    allowed = [one.token_id for one in expected[-1]["TokenOutput 0"] if isinstance(one, TokenOutput)]
    assert len(allowed) >= 8
    assert all(token % 3 == 0 for token in allowed)


# Another member than the head samples. Sessions run over the reverse.
@pytest.mark.parametrize("layout", cases(LAYOUTS, "forward of 3".__eq__))
def test_every_request_is_answered_as_by_one_member(
    demo: ModelSource, expected: list[dict[str, list[Output]]], layout: str
) -> None:
    pace = PACES[list(LAYOUTS).index(layout)]
    spans = LAYOUTS[layout]
    with running_cluster(demo, len(spans), spans=spans, **pace) as cluster:
        assert answers(cluster) == expected
        # Few blocks keep nothing, and a prompt in chunks of one token takes its time.
        if not pace.get("num_blocks") and pace.get("prefill_chunk") != 1:
            assert answers(cluster) == expected, "with what the first round left in the prefix cache"
        assert cluster.status().route.startswith("complete: ")


@pytest.mark.long
def test_one_member_gives_the_same_answers_at_any_pace(
    demo: ModelSource, expected: list[dict[str, list[Output]]]
) -> None:
    for pace in PACES:
        with running_cluster(demo, 1, **pace) as cluster:
            assert answers(cluster) == expected
