"""``convoy bench tp``: compare two ranks on every layer with one member, and with a pipeline of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb, counts, print_rows
from convoy.cli.local.pin import pinned
from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.bench.ranks.all_reduce import AllReduceRow
    from convoy.bench.ranks.tp import TpMachine
    from convoy.bench.report.report import DecodeRow, Report
    from convoy.bench.throughput import DecodeOptions

_MAX_CONCURRENT = 64
_ALL = "single,pipeline,tensor"


@bench_verb(max_seconds=1800)
def tp(
    run: BenchRun,
    concurrent: Annotated[str, typer.Option(help="Counts of requests that decode at once.")] = "1,8,64",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    windows: Annotated[int, typer.Option(min=1, help="Measured windows for each count.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each request in a window.")] = 8,
    modes: Annotated[str, typer.Option(help="Some of the three; a large model takes long to load.")] = _ALL,
) -> None:
    """Compare one member, a pipeline of two, and two ranks. Also shows when each pays. Both ranks hold every
    layer.
    """
    from convoy.bench.ranks.tp import mode_row, ratios_of
    from convoy.bench.throughput import DecodeOptions

    chosen = _modes(modes)
    sizes = counts("--concurrent", concurrent, _MAX_CONCURRENT)
    options = DecodeOptions(sizes, context, windows, tokens)
    run.check_context(context + options.max_tokens)
    measured = {mode: _decode(run, mode, options) for mode in chosen}
    sums = _all_reduces(run, sizes)
    machine = _machine(run, sums)
    rows = [mode_row(mode, row, machine) for mode in chosen for row in measured[mode]]
    lines = {
        mode: [(float(row.concurrent), row.tokens_per_s) for row in rows if row.mode == mode]
        for mode in chosen
    }
    threads = run.options(2, {}).threads
    settings = {"context": context, "windows": windows, "window_tokens": tokens, "threads": threads}
    report = run.report("tp", settings, [*rows, *sums], ratios_of(rows, machine))
    run.show(report, ("requests at once", "tokens/s"), lines, _print)


def _modes(text: str) -> list[str]:
    """Return the modes in their order. Raises UsageError."""
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in _ALL.split(","):
            raise UsageError(f"--modes has {name!r}, expected some of {_ALL} between commas")
    return [mode for mode in _ALL.split(",") if mode in asked]


def _decode(run: BenchRun, mode: str, options: DecodeOptions) -> list[DecodeRow]:
    from convoy.bench.throughput import measure_decode

    limits = {
        "max_batch": max(options.concurrent),
        "prefill_chunk": options.prefill_chunk,
        "num_blocks": options.num_blocks,
    }
    members = 1 if mode == "single" else 2
    run.say(f"{mode}:")
    with run.cluster(members, limits, {"parallel": mode}) as cluster:
        size, deadline = cluster.tokenizer.vocab_size, run.clock.deadline
        return measure_decode(cluster.engine, size, members, options, deadline=deadline, say=run.say)


def _all_reduces(run: BenchRun, sizes: tuple[int, ...]) -> list[AllReduceRow]:
    """Measure all-reduces of two processes alone, on a step's rows for each number of requests."""
    from convoy.bench.ranks.all_reduce import SEALED, AllReduceOptions, measure_all_reduce
    from convoy.model.checkpoints.source import ModelSource

    row_bytes = 4 * ModelSource.resolve(run.named_model).spec.hidden_size
    options = AllReduceOptions(sizes=tuple(size * row_bytes for size in sizes))
    return measure_all_reduce(options, run.clock.deadline, run.say, through=(SEALED,))


def _machine(run: BenchRun, sums: list[AllReduceRow]) -> TpMachine:
    """Measure this machine on the cores of one member."""
    from convoy.bench.ranks.tp import TpMachine
    from convoy.model.backends.host.checks.selfcheck import choose_kernel
    from convoy.model.backends.host.speed import measure_speed
    from convoy.model.checkpoints.source import ModelSource

    threads = run.options(2, {}).threads
    kernel = choose_kernel(run.kernel, threads)
    with pinned(run.alone_cores):
        speed = measure_speed(kernel, threads)
    return TpMachine(ModelSource.resolve(run.named_model).spec, kernel, speed, sums[0].p50_us / 1e6)


def _print(report: Report) -> None:
    print_rows(report)
    count = report.ratios.get("num_all_reduces")
    if count is None:
        return
    if "crossover_measured_us" not in report.ratios:
        return
    names = ("crossover_us", "crossover_measured_us")
    predicted, measured = (_below(report.ratios[name]) for name in names)
    print(f"one request: two ranks pay {count:g} all-reduces a step; they beat a pipeline where one takes")
    print(f"{predicted} as predicted, {measured} as measured")


def _below(crossover_us: float) -> str:
    return f"less than {crossover_us:g} us" if crossover_us > 0 else "no time at all, and not even then,"
