"""Write a bench's results as JSON, and as tables for other programs."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from convoy.bench.report.machine import Machine

ENGINE, STAGE, STAGES, RING = "engine", "stage", "stages", "ring"


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Hold the rate of ``concurrent`` requests that decode at once on ``members``: the median of all windows.

    ``tokens_per_s`` is that of all requests together, ``ms_per_token`` that of one of them. ``through`` is
    `ENGINE` for the product, and `STAGE` for the whole model as one bare stage without an engine.
    """

    members: int
    concurrent: int
    # Of the longest request at the end.
    context_tokens: int
    tokens_per_s: float
    ms_per_token: float
    through: str = ENGINE


@dataclass(frozen=True, slots=True)
class StepRow:
    """Hold the steps of one decode without an engine.

    ``through`` is `STAGE` for one stage, `STAGES` for two members' stages one after the other in one process,
    and `RING` for the same two as members, with ``num_hops`` between them.
    """

    through: str
    num_hops: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Hold one prompt in chunks, from its submission to its first token: the median of all rounds.

    ``window`` is the number of its chunks that may be in flight. ``next_turn_s`` is the same time for a
    prompt that goes on where this one ends, with ``next_turn_cached`` of its tokens from the prefix cache.
    """

    members: int
    prompt_tokens: int
    chunk: int
    window: int
    seconds: float
    tokens_per_s: float
    next_turn_s: float
    next_turn_cached: float


@dataclass(frozen=True, slots=True)
class Report:
    """Hold all results of a run, in the order in which JSON shows them. Rows are frozen dataclasses."""

    bench: str
    machine: Machine
    model: str | None
    settings: Mapping[str, int | float | str | bool]
    rows: tuple[Any, ...]
    ratios: Mapping[str, float]

    def tables(self) -> list[list[Any]]:
        """Return the rows in groups: consecutive rows of one kind together."""
        return [list(rows) for _, rows in itertools.groupby(self.rows, type)]

    def csv(self) -> str:
        """Return the rows as CSV: a line each, under a line of names for each group of `tables`."""
        text = io.StringIO()
        for rows in self.tables():
            writer = csv.DictWriter(text, list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
        return text.getvalue()


def decode_ratios(rows: list[DecodeRow]) -> dict[str, float]:
    """Return the ratios for which the rows exist. `bench/METHODOLOGY.md` explains them."""
    rate = {(row.members, row.concurrent, row.through): row.tokens_per_s for row in rows}
    wanted = {
        "batch_16_over_serial": ((2, 16, ENGINE), (2, 1, ENGINE)),
        "two_members_over_one_decode": ((2, 32, ENGINE), (1, 16, ENGINE)),
        # Ratios of times per token, which are the inverse of rates, so these pairs are swapped.
        "loop_over_solo": ((1, 1, STAGE), (1, 1, ENGINE)),
        "alone_over_solo": ((1, 1, STAGE), (2, 1, ENGINE)),
    }
    return {
        name: round(rate[over] / rate[under], 3)
        for name, (over, under) in wanted.items()
        if over in rate and under in rate
    }


def hop_ratios(decodes: list[DecodeRow], steps: list[StepRow]) -> dict[str, float]:
    """Return the cost of a hop beside the stages' compute, and the remaining overhead without the hops."""
    step = {row.through: row for row in steps}
    num_hops = step[RING].num_hops
    hop_ms = (step[RING].p50_ms - step[STAGES].p50_ms) / num_hops
    ms = {(row.members, row.through): row.ms_per_token for row in decodes}
    solo_and_hops_ms = ms[1, STAGE] + num_hops * max(0.0, hop_ms)
    return {
        "hop_us": round(1000 * hop_ms, 1),
        "alone_over_solo_and_hops": round(ms[2, ENGINE] / solo_and_hops_ms, 3),
    }


def prefill_ratios(rows: list[PrefillRow]) -> dict[str, float]:
    """Return the rate of two members at their best chunk and window over one member's at its best chunk."""
    best: dict[int, float] = {}
    for row in rows:
        best[row.members] = max(best.get(row.members, 0.0), row.tokens_per_s)
    return {"two_members_over_one_prefill": round(best[2] / best[1], 3)} if best.keys() >= {1, 2} else {}
