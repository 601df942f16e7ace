"""``convoy bench hop`` and ``comms``: time hops and sums between two processes, by size and sealing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli.benches.run import BenchRun, bench_verb, counts, print_machine
from convoy.cli.running.start import keep_nccl_on_loopback
from convoy.cli.show.output import print_note, print_table
from convoy.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from convoy.bench.hop.hop import HopOptions, HopRow
    from convoy.bench.ranks.all_reduce import AllReduceRow
    from convoy.bench.report.report import Report

_QUIET_S = 1.0
_MAX_ROWS = 16384
_MAX_SUM_KIB = 256 * 1024

RoundsFlag = Annotated[
    int, typer.Option(min=1, help="Round trips per size and sealing; fewer for large sizes.")
]


@bench_verb(model=None, max_seconds=600)
def hop(run: BenchRun, rounds: RoundsFlag = 400) -> None:
    """Time a hop between two processes, by layers of sealing. Twice, once and, only in this bench, not at
    all.
    """
    from convoy.bench.hop.hop import HopOptions, ratios_of

    rows, settings = _hops(run, HopOptions(rounds))
    report = run.report("hop", settings, rows, ratios_of(rows))
    run.show(report, ("KiB of a hop", "us for a hop, p50"), _lines_of(rows), _print_hop)


@bench_verb(model=None, max_seconds=900)
def comms(
    run: BenchRun,
    what: Annotated[str, typer.Option(help="hop, all-reduce or both.")] = "both",
    sizes: Annotated[
        str, typer.Option(help="Rows of 2,048 float32 that a hop carries.")
    ] = "1,4,16,64,256,1024,4096",
    sums: Annotated[str, typer.Option(help="KiB of float32 that ranks add.")] = "2,8,32,128,512,2048,16384",
    rounds: RoundsFlag = 200,
) -> None:
    """Time hops by size, and sums of two ranks. Sums are sealed, or in clear between one member's ranks."""
    from convoy.bench.hop.hop import HopOptions, ratios_of
    from convoy.bench.ranks.all_reduce import all_reduce_ratios

    if what not in {"hop", "all-reduce", "both"}:
        raise UsageError(f"--what is {what!r}, expected hop, all-reduce or both")
    rows, settings, ratios = _sums(run, sums, rounds) if what != "hop" else ([], {}, {})
    lines = _lines_of_sums(rows)
    axes = ("KiB that are added", "us for an all-reduce, p50")
    if what != "all-reduce":
        options = HopOptions(rounds, rows=counts("--sizes", sizes, _MAX_ROWS))
        hops, said = _hops(run, options)
        rows, settings, ratios = [*hops, *rows], settings | said, ratios_of(hops) | all_reduce_ratios(rows)
        lines |= _lines_of(hops)
        axes = ("KiB", "us, p50")
    run.show(run.report("comms", settings, rows, ratios), axes, lines, _print_comms)


def _sums(run: BenchRun, sums: str, rounds: int) -> tuple[list[Any], dict[str, Any], dict[str, float]]:
    from convoy.bench.ranks.all_reduce import AllReduceOptions, all_reduce_ratios, measure_all_reduce

    sizes = tuple(1024 * kib for kib in counts("--sums", sums, _MAX_SUM_KIB))
    options = AllReduceOptions(5 * rounds, sizes)
    keep_nccl_on_loopback()
    found = measure_all_reduce(options, run.clock.deadline, run.say)
    return found, {"sums": options.rounds}, all_reduce_ratios(found)


def _hops(run: BenchRun, options: HopOptions) -> tuple[tuple[HopRow, ...], dict[str, Any]]:
    from convoy.bench.hop.hop import measure_hop, settings_of

    measured = measure_hop(options, run.clock.deadline, _Noted())
    return measured.rows, settings_of(options, measured.cipher)


def _lines_of(rows: Sequence[HopRow]) -> dict[str, list[tuple[float, float]]]:
    return {
        f"sealing {sealing}": [(row.bytes / 1024, row.p50_us / 2) for row in rows if row.sealing == sealing]
        for sealing in dict.fromkeys(row.sealing for row in rows)
    }


def _lines_of_sums(rows: Sequence[AllReduceRow]) -> dict[str, list[tuple[float, float]]]:
    return {
        f"sum, {way}": [(row.bytes / 1024, row.p50_us) for row in rows if row.through == way]
        for way in dict.fromkeys(row.through for row in rows)
    }


class _Noted:
    """Print a line on standard error per block, once the run takes longer than a second."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, done: int, num_all: int) -> None:
        if time.monotonic() - self._started_s > _QUIET_S:
            print_note(f"measured {done} of {num_all} blocks")


def _print_rows(rows: tuple[HopRow, ...]) -> None:
    from convoy.bench.hop.hop import size_name

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
    from convoy.bench.hop.hop import HopRow, size_name

    hops = tuple(row for row in report.rows if isinstance(row, HopRow))
    if hops:
        _print_rows(hops)
        print("times are of round trips, which are two hops")
        print(f"the cipher is {report.settings['cipher']}\n")
    sums = [row for row in report.rows if not isinstance(row, HopRow)]
    if sums:
        fields = [
            (row.through, size_name(row.bytes), f"{row.p50_us:.1f}", f"{row.p90_us:.1f}", f"{row.p99_us:.1f}")
            for row in sums
        ]
        print_table(("all-reduce", "tensor", "p50 us", "p90 us", "p99 us"), fields)
        print()
    print_machine(report)
