"""Measure speculation: one text at a time, with drafts and without, over wires of several delays.

bench/METHODOLOGY.md describes the texts and explains the figures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convoy.bench.masks import SCHEMA
from convoy.bench.report.clock import Deadline
from convoy.bench.throughput import GREEDY
from convoy.engine.completion import Completion, generate
from convoy.engine.engine import Engine
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import ConvoyError
from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.grammar import Grammar
from convoy.model.text.tokens import Tokenizer

PLAIN, REPETITIVE, FORMED = "plain", "repetitive", "schema"
KINDS = (PLAIN, REPETITIVE, FORMED)
SEEDED = SamplingParams(temperature=0.8, seed=1)

_STORIES = (
    "Tell me a story about a fox and a boat.",
    "Write a story about a girl who finds a key.",
    "Tell me a story about a snail.",
)
_COUNTED = 'Q: How many times does "{0}" appear here: {0} {0} {0} {0} {0} {0} {0} {0} {0}?\nA: 4\n'
_REPEATED = (
    _COUNTED.format("salt") * 2,
    _COUNTED.format("smoke") * 2 + "Q: How",
    "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat",
)


@dataclass(frozen=True, slots=True)
class SpecRow:
    """Hold the texts of one kind, one after the other, ``rounds`` times. ``tokens_per_s`` is the median
    round's.

    ``delay_ms`` is added to each hop; ``round_trip_ms`` is the round trip of an empty frame then. ``drafted``
    and ``accepted`` are draft tokens of one round. ``identical`` means that the texts equal those without
    drafts.
    """

    text: str
    drawn: str
    delay_ms: float
    speculate: int
    tokens: int
    tokens_per_s: float
    drafted: int
    accepted: int
    identical: bool
    round_trip_ms: float


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Hold the options: at most ``num_tokens`` of each text, and ``num_rounds`` of each kind and way of
    sampling.
    """

    num_tokens: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Contender:
    """Hold a cluster to measure, and the delay of its wire."""

    engine: Engine
    tokenizer: Tokenizer
    speculate: int
    delay_ms: float
    round_trip_ms: float


class Said:
    """Keep the texts without drafts, to compare all others with them."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def check(self, kind: str, drawn: str, answers: Sequence[Completion]) -> None:
        """Compare the answers of a kind with its first ones. Raises ConvoyError if they differ."""
        found = [answer.token_ids for answer in answers]
        if self._tokens.setdefault((kind, drawn), found) != found:
            raise ConvoyError(
                f"the {kind} text ({drawn}) differs from the text without guesses",
                hint="in exact mode this is a bug; other kernels round by the number of rows in a step",
            )


def measure_spec(
    contenders: Sequence[Contender], options: SpecOptions, *, said: Said, deadline: Deadline
) -> list[SpecRow]:
    """Return a row for each kind of text, way of sampling and contender, the one without drafts first.

    Contenders take turns, text by text, so that other work on the machine affects all alike. Raises
    ConvoyError if a text differs.
    """
    rows = []
    # At a temperature the demo model soon leaves a repetition, and that text is plain.
    for kind, drawn, params in (
        (PLAIN, "greedy", GREEDY),
        (PLAIN, "seeded", SEEDED),
        (REPETITIVE, "greedy", GREEDY),
        (FORMED, "seeded", SEEDED),
    ):
        requests = _requests(contenders[0].tokenizer, kind, params, options.num_tokens)
        before = [contender.engine.stats() for contender in contenders]
        rates: list[list[float]] = [[] for _ in contenders]
        answers: list[list[Completion]] = []
        for _ in range(options.num_rounds):
            deadline.left_s()
            turns = [[generate(one.engine, request) for one in contenders] for request in requests]
            answers = [list(texts) for texts in zip(*turns, strict=True)]
            for texts, found in zip(answers, rates, strict=True):
                said.check(kind, drawn, texts)
                found.append(_rate(texts))
        for one, found, texts, start in zip(contenders, rates, answers, before, strict=True):
            stats = one.engine.stats()
            rows.append(
                SpecRow(
                    text=kind,
                    drawn=drawn,
                    delay_ms=one.delay_ms,
                    speculate=one.speculate,
                    tokens=sum(len(answer.token_ids) for answer in texts),
                    tokens_per_s=round(statistics.median(found), 2),
                    drafted=(stats.drafted_tokens - start.drafted_tokens) // options.num_rounds,
                    accepted=(stats.accepted_tokens - start.accepted_tokens) // options.num_rounds,
                    # `check` raises for any other text.
                    identical=True,
                    round_trip_ms=one.round_trip_ms,
                )
            )
    return rows


def _requests(
    tokenizer: Tokenizer, kind: str, params: SamplingParams, num_tokens: int
) -> list[GenerationRequest]:
    """Return the requests of one kind. Repetitive texts run to the last token; the others end by themselves.

    Much of an answer to a schema is forced, and forced tokens are guesses that are certain.
    """
    grammar = None
    if kind == FORMED:
        source = Grammar("json_schema", json.dumps(SCHEMA))
        grammar = GrammarCompiler(tokenizer).compile(source, "schema")
    if kind in (PLAIN, FORMED):
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in _STORIES]
    else:
        prompts = [tokenizer.encode(text) for text in _REPEATED]
    endless = kind == REPETITIVE
    return [
        GenerationRequest(tuple(ids), params, num_tokens, ignore_eos=endless, grammar=grammar)
        for ids in prompts
    ]


def _rate(answers: Sequence[Completion]) -> float:
    """Return tokens per second after the first token of each text."""
    num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    return num_tokens / sum(answer.total_s - answer.time_to_first_token_s for answer in answers)


def spec_ratios(rows: Iterable[SpecRow]) -> dict[str, float]:
    """Return tokens per second with drafts over those without, for each text and delay."""
    rate = {(row.text, row.drawn, row.delay_ms, row.speculate > 0): row.tokens_per_s for row in rows}
    return {
        f"{text}_{drawn}_{delay_ms:g}_ms": round(rate[text, drawn, delay_ms, True] / under, 3)
        for (text, drawn, delay_ms, guesses), under in rate.items()
        if not guesses and (text, drawn, delay_ms, True) in rate
    }
