"""``convoy bench hop`` and ``comms``: what a hop between two processes costs, by size and by sealing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.bench_run import BenchRun, bench_verb, counts, print_machine
from convoy.cli.output import print_note, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from convoy.bench.hop import HopOptions, HopRow
    from convoy.bench.report import Report

_QUIET_S = 1.0
_MAX_ROWS = 16384

RoundsFlag = Annotated[int, typer.Option(min=1, help="Round trips per block and sealing; large ones fewer.")]


@bench_verb(model=None, max_seconds=600)
def hop(run: BenchRun, rounds: RoundsFlag = 400) -> None:
    """Time a hop between two processes: sealed twice, once and, in here only, not at all."""
    from convoy.bench.hop import HopOptions

    _measure("hop", run, HopOptions(rounds), _print_hop)


@bench_verb(model=None, max_seconds=900)
def comms(
    run: BenchRun,
    sizes: Annotated[
        str, typer.Option(help="Rows of 2,048 float32 that a hop carries.")
    ] = "1,4,16,64,256,1024,4096",
    rounds: RoundsFlag = 200,
) -> None:
    """The same by size, from the row of one decode to a long prefill chunk."""
    from convoy.bench.hop import HopOptions

    _measure("comms", run, HopOptions(rounds, rows=counts("--sizes", sizes, _MAX_ROWS)), _print_comms)


def _measure(name: str, run: BenchRun, options: HopOptions, table: Callable[[Report], None]) -> None:
    from convoy.bench.hop import SEALINGS, measure_hop, ratios_of, settings_of

    measured = measure_hop(options, run.clock.deadline, _Noted())
    rows = measured.rows
    report = run.report(name, settings_of(options, measured.cipher), rows, ratios_of(rows))
    lines = {
        f"sealing {sealing}": [(row.bytes / 1024, row.p50_us / 2) for row in rows if row.sealing == sealing]
        for sealing in SEALINGS
    }
    run.show(report, ("KiB of a hop", "us for a hop, p50"), lines, table)


class _Noted:
    """A line on standard error per block, once the run takes longer than a second."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, done: int, num_all: int) -> None:
        if time.monotonic() - self._started_s > _QUIET_S:
            print_note(f"measured {done} of {num_all} blocks")


def _print_rows(rows: tuple[HopRow, ...]) -> None:
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
            for row in rows
        ],
    )
    print()


def _print_hop(report: Report) -> None:
    _print_rows(report.rows)
    ratios = report.ratios
    print(f"both layers add {ratios['p50_8KiB_both_minus_none_us']:.0f} us to an 8 KiB round trip")
    print(f"and leave {ratios['gb_per_s_16MiB_both_over_none']:.0%} of the plain throughput at 16 MiB")
    print(f"the cipher is {report.settings['cipher']}")
    print_machine(report)


def _print_comms(report: Report) -> None:
    _print_rows(report.rows)
    print("times are of round trips, which are two hops")
    print(f"the cipher is {report.settings['cipher']}")
    print_machine(report)
