"""What guessing ahead brings: one text at a time, with guesses and without, over wires of several lengths.

bench/METHODOLOGY.md says what the texts are and what the figures mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convoy.bench.report.clock import Deadline
from convoy.bench.throughput import GREEDY
from convoy.engine.completion import Completion, generate
from convoy.engine.engine import Engine
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import ConvoyError
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer

PLAIN, REPETITIVE = "plain", "repetitive"
KINDS = (PLAIN, REPETITIVE)
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
    """The texts of one kind, one after the other, ``rounds`` times; ``tokens_per_s`` is the median round's.

    ``delay_ms`` is put into each hop; ``round_trip_ms`` is what an empty frame then takes there and back.
    ``drafted`` and ``accepted`` are guesses of one round. ``identical``: the texts are those without guesses.
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
    """``num_tokens`` of each text at most; each kind and way of drawing is said ``num_rounds`` times."""

    num_tokens: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Contender:
    """A cluster to measure, and the wire that it is on."""

    engine: Engine
    tokenizer: Tokenizer
    speculate: int
    delay_ms: float
    round_trip_ms: float


class Said:
    """What was said without guesses, so that all else can be compared with it."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def check(self, kind: str, drawn: str, answers: Sequence[Completion]) -> None:
        """The first answers of a kind are the measure. Raises ConvoyError for others than those."""
        found = [answer.token_ids for answer in answers]
        if self._tokens.setdefault((kind, drawn), found) != found:
            raise ConvoyError(
                f"the {kind} text ({drawn}) is another than it was without guesses",
                hint="in exact mode this is a bug; other kernels round by the number of rows in a step",
            )


def measure_spec(
    contenders: Sequence[Contender], options: SpecOptions, *, said: Said, deadline: Deadline
) -> list[SpecRow]:
    """A row for each kind of text, way of drawing and contender, the one without guesses first.

    They take turns, text by text, so that what else the machine does hits all alike. Raises ConvoyError where
    a text is not the same.
    """
    rows = []
    # At a temperature the demo model soon leaves a repetition, and that text is plain.
    for kind, drawn, params in (
        (PLAIN, "greedy", GREEDY),
        (PLAIN, "seeded", SEEDED),
        (REPETITIVE, "greedy", GREEDY),
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
                    identical=True,  # or `check` would have raised
                    round_trip_ms=one.round_trip_ms,
                )
            )
    return rows


def _requests(
    tokenizer: Tokenizer, kind: str, params: SamplingParams, num_tokens: int
) -> list[GenerationRequest]:
    """Stories are asked for and end by themselves; what repeats itself is gone on with, to the last token."""
    if kind == PLAIN:
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in _STORIES]
    else:
        prompts = [tokenizer.encode(text) for text in _REPEATED]
    endless = kind == REPETITIVE
    return [GenerationRequest(tuple(ids), params, num_tokens, ignore_eos=endless) for ids in prompts]


def _rate(answers: Sequence[Completion]) -> float:
    """Tokens after the first of each text, by the time that they took."""
    num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    return num_tokens / sum(answer.total_s - answer.time_to_first_token_s for answer in answers)


def spec_ratios(rows: Iterable[SpecRow]) -> dict[str, float]:
    """Tokens per second with guesses over those without, for each text and delay."""
    rate = {(row.text, row.drawn, row.delay_ms, row.speculate > 0): row.tokens_per_s for row in rows}
    return {
        f"{text}_{drawn}_{delay_ms:g}_ms": round(rate[text, drawn, delay_ms, True] / under, 3)
        for (text, drawn, delay_ms, guesses), under in rate.items()
        if not guesses and (text, drawn, delay_ms, True) in rate
    }
