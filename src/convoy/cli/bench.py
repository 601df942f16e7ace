"""``convoy bench``: measurements that others can repeat; bench/METHODOLOGY.md says how they are made."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli import throughput
from convoy.cli.output import JsonFlag, print_json, print_note, print_table

if TYPE_CHECKING:
    from convoy.bench.hop import HopReport

app = typer.Typer(rich_markup_mode=None)

_QUIET_S = 1.0


@app.callback()
def bench() -> None:
    """Measure sealing, and what one and two members reach."""


app.command("solo")(throughput.solo)
app.command("batch")(throughput.batch)
app.command("prefill")(throughput.prefill)


@app.command("hop")
def hop(
    rounds: Annotated[int, typer.Option(min=1, help="8 KiB round trips per block and sealing.")] = 400,
    as_json: JsonFlag = False,
) -> None:
    """Time a hop between two processes: sealed twice, once and, in here only, not at all."""
    from convoy.bench.hop import HopOptions, measure_hop

    report = measure_hop(HopOptions(rounds), _Noted())
    if as_json:
        print_json(report)
    else:
        _print(report)


class _Noted:
    """A line on standard error per block, once the run takes longer than a second."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, done: int, num_all: int) -> None:
        if time.monotonic() - self._started_s > _QUIET_S:
            print_note(f"measured {done} of {num_all} blocks")


def _print(report: HopReport) -> None:
    from convoy.bench.hop import size_name

    print_table(
        ("tensor", "sealing", "p50 us", "p99 us", "GB/s"),
        [
            (
                size_name(row.bytes),
                row.sealing,
                f"{row.p50_us:.1f}",
                f"{row.p99_us:.1f}",
                f"{row.gb_per_s:.2f}",
            )
            for row in report.rows
        ],
    )
    machine, ratios = report.machine, report.ratios
    print()
    print(f"both layers add {ratios['p50_8KiB_both_minus_none_us']:.0f} us to an 8 KiB round trip")
    print(f"and leave {ratios['gb_per_s_16MiB_both_over_none']:.0%} of the plain throughput at 16 MiB")
    print(f"{machine.num_cores} cores of {machine.cpu}, {report.settings['cipher']}")
    print(f"other processes took {machine.others:.0%} of the cores meanwhile")
