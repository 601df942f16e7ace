"""What a bench of a whole model found, as JSON and as a table for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from convoy.bench.machine import Machine


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """``concurrent`` requests decode at once on ``members``; the median of all windows.

    ``tokens_per_s`` is that of all requests together, ``ms_per_token`` that of one of them.
    """

    members: int
    concurrent: int
    context_tokens: int  # of the longest request at the end
    tokens_per_s: float
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One prompt, in chunks, from its submission to its first token; the median of all rounds."""

    members: int
    prompt_tokens: int
    chunk: int
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """All that a run found, in the order in which it is printed as JSON."""

    bench: str
    machine: Machine
    model: str
    settings: Mapping[str, int | str | bool]
    rows: tuple[DecodeRow | PrefillRow, ...]
    ratios: Mapping[str, float]

    def csv(self) -> str:
        """The rows, a line each under a line of names; kinds of rows that follow each other get one each."""
        text = io.StringIO()
        names: list[str] = []
        for row in self.rows:
            values = asdict(row)
            if names != list(values):
                names = list(values)
                csv.writer(text).writerow(names)
            csv.writer(text).writerow(values.values())
        return text.getvalue()


def decode_ratios(rows: list[DecodeRow]) -> dict[str, float]:
    """Those whose rows are there; `bench/METHODOLOGY.md` says what they mean."""
    rate = {(row.members, row.concurrent): row.tokens_per_s for row in rows}
    wanted = {
        "batch_16_over_serial": ((2, 16), (2, 1)),
        "two_members_over_one_decode": ((2, 32), (1, 16)),
        "alone_over_solo": ((1, 1), (2, 1)),  # of times per token, which are the rates' inverse
    }
    return {
        name: round(rate[over] / rate[under], 3)
        for name, (over, under) in wanted.items()
        if over in rate and under in rate
    }


def prefill_ratios(rows: list[PrefillRow]) -> dict[str, float]:
    """Two members at their best chunk over one at its own."""
    best: dict[int, float] = {}
    for row in rows:
        best[row.members] = max(best.get(row.members, 0.0), row.tokens_per_s)
    return {"two_members_over_one_prefill": round(best[2] / best[1], 3)} if best.keys() >= {1, 2} else {}
