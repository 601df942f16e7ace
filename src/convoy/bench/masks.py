"""Measure what the masks of grammars cost in a step, beside the step itself.

Each answer of a step follows a schema with objects, lists and texts. The cost is that of filling all masks at
once, of applying them to the logits, and of moving on by a random allowed token.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convoy.bench.floor import FloorRow
from convoy.bench.report.clock import Deadline
from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.constraints.matcher import CompiledGrammar, MaskFiller, Matcher
from convoy.model.sampling.output_rows import SampleJob, sample_row
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.grammar import Grammar
from convoy.model.text.tokens import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "is_available_for_delivery": {"type": "boolean"},
        "category_of_the_product": {"enum": ["furniture", "electronics", "garden and outdoor", "toys"]},
        "dimensions_in_centimetres": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 3,
            "maxItems": 3,
        },
    },
    "required": [
        *("name", "is_available_for_delivery", "category_of_the_product", "dimensions_in_centimetres")
    ],
    "additionalProperties": False,
}
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class MaskRow:
    """Hold the cost of masks in a step of ``concurrent`` answers; ``of_step`` is its share of the step."""

    kernel: str
    concurrent: int
    vocab_size: int
    mask_ms: float
    of_step: float


def measure_masks(
    tokenizer: Tokenizer, floors: Sequence[FloorRow], num_steps: int, deadline: Deadline
) -> list[MaskRow]:
    """Return the cost of masks beside each of the steps in ``floors``. Raises ConvoyError at the deadline."""
    grammar = GrammarCompiler(tokenizer).compile(Grammar("json_schema", json.dumps(SCHEMA)), "schema")
    rows = []
    for floor in floors:
        deadline.left_s()
        mask_ms = 1000 * _seconds(grammar, tokenizer.vocab_size, floor.concurrent, num_steps)
        share = round(mask_ms / floor.step_ms, 4)
        rows.append(
            MaskRow(floor.kernel, floor.concurrent, tokenizer.vocab_size, round(mask_ms, 4), of_step=share)
        )
    return rows


def _seconds(grammar: CompiledGrammar, vocab_size: int, count: int, num_steps: int) -> float:
    """Return the median seconds of a step's masks."""
    random, filler = np.random.default_rng(1), MaskFiller()
    matchers = [grammar.matcher() for _ in range(count)]
    logits = random.standard_normal((num_steps, vocab_size)).astype(np.float32)
    took = []
    for values in logits:
        matchers = [grammar.matcher() if one.complete else one for one in matchers]
        began_s = time.perf_counter()
        filler.fill([(one, ()) for one in matchers])
        between_s = time.perf_counter()
        for one in matchers:
            _draw(one, values, one.masks[0])
        masked_s = time.perf_counter()
        for _ in matchers:
            sample_row(values, SampleJob(_GREEDY, 0, 0))
        # Sampling itself is part of every step, so only what the mask adds to it counts.
        free_s = time.perf_counter() - masked_s
        took.append(between_s - began_s + max(0.0, masked_s - between_s - free_s))
    return statistics.median(took)


def _draw(matcher: Matcher, values: np.ndarray[tuple[int], np.dtype[np.float32]], mask: bytes) -> None:
    sampled = sample_row(values, SampleJob(_GREEDY, 0, 0, mask=mask)).sampled
    # The end of text leaves the matcher in its place, until the answer is complete.
    matcher.consume(sampled.token_id)


def mask_ratios(rows: Sequence[MaskRow]) -> dict[str, float]:
    """Return the share of a step that its masks cost, for each kernel and count."""
    return {f"{row.kernel}_masks_of_step_{row.concurrent}": row.of_step for row in rows}
