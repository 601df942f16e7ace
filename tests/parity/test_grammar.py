"""A grammar gives the same bytes on every layout, with and without guesses, and through preemption."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from convoy.engine.outputs import FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.grammar import Grammar
from convoy.model.text.tokens import Tokenizer
from parity.test_speculation import LAYOUTS, answers, running
from support.cases import cases

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 1,
            "maxItems": 3,
        },
        "a rather long name of a property": {"type": "boolean"},
    },
    "required": ["name", "colour", "sizes", "a rather long name of a property"],
    "additionalProperties": False,
}
PATTERN = r"[A-Z][a-z]{3,8} (is|was) here, (once|twice) and never again\."


def requests_for(source: ModelSource) -> list[GenerationRequest]:
    tokenizer = Tokenizer(source)
    compiler = GrammarCompiler(tokenizer)
    schema = compiler.compile(Grammar("json_schema", json.dumps(SCHEMA)), "response_format")
    pattern = compiler.compile(Grammar("regex", PATTERN), "guided_regex")
    prompt = tuple(tokenizer.encode("The cat sat on the mat. The"))
    seeded = SamplingParams(temperature=1.2, seed=4, logprobs=2)
    greedy = SamplingParams(temperature=0.0, logprobs=1)
    return [
        *(GenerationRequest(prompt, seeded, 120, num_choices=2, grammar=one) for one in (schema, pattern)),
        GenerationRequest(prompt, greedy, 120, grammar=pattern),
        # It ends with "length", in the middle.
        GenerationRequest(prompt, seeded, 9, grammar=schema),
        # A neighbour without a grammar shares the steps.
        GenerationRequest(prompt, seeded, 30, ignore_eos=True),
    ]


def texts(told: list[Output]) -> list[str]:
    return [
        "".join(
            one.text for one in told if isinstance(one, TokenOutput | FinishOutput) and one.choice == choice
        )
        for choice in range(2)
    ]


@pytest.fixture(scope="module")
def alone(demo: ModelSource) -> list[list[Output]]:
    with running(demo, jump_forward=False) as cluster:
        told = answers(cluster, requests_for(demo))
        assert cluster.engine.stats().drafted_tokens == 0
    return told


def test_answers_of_a_model_match_their_grammar(alone: list[list[Output]]) -> None:
    for text in texts(alone[0]):
        found = json.loads(text)
        assert list(found) == SCHEMA["required"]
        assert found["colour"] in ("red", "green", "blue")
        assert len(found["name"]) <= 12
    assert all(re.fullmatch(PATTERN, text) for text in [*texts(alone[1]), texts(alone[2])[0]])


GUESSES: dict[str, dict[str, Any]] = {"off": {"jump_forward": False}, "forced": {}, "all": {"speculate": 8}}
# Each kind of guess, and the layouts that test_speculation.py leaves to `make test-long`.
QUICK = [("forward", "all"), ("few blocks", "forced")]


@pytest.mark.parametrize(
    ("layout", "guesses"), cases(itertools.product(LAYOUTS, GUESSES), QUICK.__contains__)
)
def test_a_grammar_gives_the_same_bits_on_any_layout_with_and_without_guesses(
    demo: ModelSource, alone: list[list[Output]], layout: str, guesses: str
) -> None:
    (spans, limits), changes = LAYOUTS[layout], GUESSES[guesses]
    with running(demo, spans, **{**limits, **changes}) as cluster:
        told = answers(cluster, requests_for(demo))
        stats = cluster.engine.stats()
    assert [list(map(_said, outputs)) for outputs in told] == [list(map(_said, outputs)) for outputs in alone]
    assert (stats.accepted_tokens > 0) == ("jump_forward" not in changes)


def _said(output: Output) -> object:
    if isinstance(output, FinishOutput):
        return (output.choice, output.reason, output.text)
    return output
