"""Write the report of `bench/compare.py providers` as one HTML page: tables, and a plot for each scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from comparisons.fleet.load import LoadResult
from convoy.bench.report.plot import Point, plot
from convoy.bench.report.report import Report

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child,td:nth-child(2){text-align:left}"
    ".no{background:#fbe3d6}svg{width:40rem;max-width:100%}"
)
_PLOTTED = ("first_token", "queue_wait", "coordinator_to_provider")


def waits(answers: Sequence[LoadResult]) -> dict[str, list[Point]]:
    """Return how many served requests took at most so many milliseconds.

    Counts double, as the plot's scale does.
    """
    served = [answer for answer in answers if answer.is_served]
    taken = {"total_e2e": [1000 * answer.total_s for answer in served]}
    for segment in _PLOTTED:
        taken[segment] = [answer.timing_us.get(f"{segment}_us", 0) / 1000 for answer in served]
    return {
        name: [(float(rank), sorted(values)[rank - 1]) for rank in _ranks(len(values))]
        for name, values in taken.items()
        if values
    }


def _ranks(count: int) -> list[int]:
    return sorted({*(1 << power for power in range(count.bit_length())), count})


def page(report: Report, lines: Mapping[str, Mapping[str, Sequence[Point]]]) -> str:
    """Return a whole document without scripts or external resources. ``lines`` holds `waits` by scenario."""
    machine = report.machine
    parts = [
        f"<h1>convoy bench {escape(report.bench)}</h1>",
        f"<p>{machine.num_cores} cores of {escape(machine.cpu)}, {escape(machine.system)}; other processes "
        f"took {machine.others:.0%} of the cores meanwhile.</p>",
        *(_table(rows) for rows in report.tables()),
    ]
    for scenario, waited in lines.items():
        if waited:
            parts.append(plot(scenario, "requests that took at most", "ms", waited))
    head = f'<meta charset="utf-8"><title>convoy bench {escape(report.bench)}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _table(rows: Sequence[Any]) -> str:
    names = list(type(rows[0]).__dataclass_fields__)
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = []
    for row in rows:
        mark = "" if getattr(row, "held", True) else ' class="no"'
        cells = "".join(f"<td>{escape(_said(getattr(row, name)))}</td>" for name in names)
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f"<table><tr>{heads}</tr>\n" + "\n".join(lines) + "\n</table>"


def _said(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
