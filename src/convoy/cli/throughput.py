"""``convoy bench solo``, ``batch`` and ``prefill``: what one and two members of this machine reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from convoy.cli.files import replace_file
from convoy.cli.local import LocalCluster, LocalOptions
from convoy.cli.output import JsonFlag, print_json, print_note, print_table
from convoy.cli.pin import PinFlag, pinned, share_cores
from convoy.cli.serve import start_cluster
from convoy.errors import ConvoyError, UsageError

if TYPE_CHECKING:
    from convoy.bench.report import DecodeRow, PrefillRow, Report
    from convoy.bench.throughput import DecodeOptions, PrefillOptions
    from convoy.engine.engine import Engine

_MODEL = "synthetic:llama-250m"
_MAX_CONCURRENT = 64
T = TypeVar("T")

ModelArgument = Annotated[str, typer.Argument(help="As for `convoy run`.")]
KernelFlag = Annotated[str, typer.Option(help="auto, exact-f32 or plain-f32.")]
ThreadsFlag = Annotated[int | None, typer.Option(min=1, help="CPU threads of each member.")]
MaxSecondsFlag = Annotated[float, typer.Option(min=1, help="Give up after so long.")]
CsvFlag = Annotated[Path | None, typer.Option("--csv", help="Write the rows here too.")]
PlotFlag = Annotated[Path | None, typer.Option("--plot", help="Write an SVG here too.")]
ConcurrentFlag = Annotated[str, typer.Option(help="Counts of requests that decode at once.")]
ContextFlag = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
WindowsFlag = Annotated[int, typer.Option(min=1, help="Measured windows for each count.")]
TokensFlag = Annotated[int, typer.Option(min=1, help="Tokens of each request in a window.")]


def solo(
    model: ModelArgument = _MODEL,
    context: ContextFlag = 512,
    windows: WindowsFlag = 5,
    tokens: TokensFlag = 32,
    kernel: KernelFlag = "auto",
    threads: ThreadsFlag = None,
    pin: PinFlag = False,
    max_seconds: MaxSecondsFlag = 600,
    csv: CsvFlag = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """One process with the whole model and one request; no links. With --pin on half of the cores."""
    run = _Run(model, kernel, threads, max_seconds, pin=pin, csv=csv, plot=plot, as_json=as_json)
    _decode("solo", run, (1,), "1", context, windows, tokens)


def batch(
    model: ModelArgument = _MODEL,
    concurrent: ConcurrentFlag = "1,4,16,32",
    context: ContextFlag = 512,
    windows: WindowsFlag = 5,
    tokens: TokensFlag = 8,
    kernel: KernelFlag = "auto",
    threads: ThreadsFlag = None,
    pin: PinFlag = False,
    max_seconds: MaxSecondsFlag = 1800,
    csv: CsvFlag = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Requests that decode at once, on one member and on two."""
    run = _Run(model, kernel, threads, max_seconds, pin=pin, csv=csv, plot=plot, as_json=as_json)
    _decode("batch", run, (1, 2), concurrent, context, windows, tokens)


def prefill(
    model: ModelArgument = _MODEL,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 8192,
    chunks: Annotated[str, typer.Option(help="Sizes of a chunk.")] = "128,256,512",
    rounds: Annotated[int, typer.Option(min=1, help="Prompts for each size.")] = 3,
    kernel: KernelFlag = "auto",
    threads: ThreadsFlag = None,
    pin: PinFlag = False,
    max_seconds: MaxSecondsFlag = 3600,
    csv: CsvFlag = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """One long prompt in chunks of several sizes, on one member and on two."""
    run = _Run(model, kernel, threads, max_seconds, pin=pin, csv=csv, plot=plot, as_json=as_json)
    _prefill(run, prompt_tokens, _counts("--chunks", chunks, 1 << 16), rounds)


def _prefill(run: _Run, prompt_tokens: int, sizes: tuple[int, ...], rounds: int) -> None:
    _check_context(run.model, prompt_tokens + 1)
    from convoy.bench.report import prefill_ratios
    from convoy.bench.throughput import BLOCK_SIZE, PrefillOptions, measure_prefill

    clock = _Clock(run.max_seconds)
    num_blocks = -(-(prompt_tokens + 1) // BLOCK_SIZE) + 1
    rows: list[PrefillRow] = []
    for members in (1, 2):
        for size in sizes:
            options = PrefillOptions(prompt_tokens, size, rounds)

            def work(
                engine: Engine, vocab_size: int, members: int = members, options: PrefillOptions = options
            ) -> PrefillRow:
                return measure_prefill(
                    engine, vocab_size, members, options, deadline=clock.deadline, say=print_note
                )

            limits = {"prefill_chunk": size, "max_step_tokens": size, "num_blocks": num_blocks}
            rows.append(run.on(members, limits, work))
    lines = {
        f"members {members}": [(row.chunk, row.tokens_per_s) for row in rows if row.members == members]
        for members in (1, 2)
    }
    settings = {"prompt_tokens": prompt_tokens, "rounds": rounds}
    run.show(clock.report("prefill", run, settings, rows, prefill_ratios(rows)), "tokens of a chunk", lines)


def _decode(
    name: str, run: _Run, members: tuple[int, ...], concurrent: str, context: int, windows: int, tokens: int
) -> None:
    from convoy.bench.report import decode_ratios
    from convoy.bench.throughput import DecodeOptions, measure_decode

    sizes = _counts("--concurrent", concurrent, _MAX_CONCURRENT)
    options = DecodeOptions(sizes, context, windows, tokens)
    _check_context(run.model, context + options.max_tokens)
    clock = _Clock(run.max_seconds)
    rows: list[DecodeRow] = []
    for count in members:

        def work(engine: Engine, vocab_size: int, count: int = count) -> list[DecodeRow]:
            return measure_decode(engine, vocab_size, count, options, deadline=clock.deadline, say=print_note)

        rows += run.on(count, _decode_limits(options), work)
    lines = {
        f"members {count}": [(row.concurrent, row.tokens_per_s) for row in rows if row.members == count]
        for count in members
    }
    settings = {"context": context, "windows": windows, "window_tokens": tokens}
    run.show(clock.report(name, run, settings, rows, decode_ratios(rows)), "requests at once", lines)


def _decode_limits(options: DecodeOptions) -> dict[str, int]:
    return {
        "max_batch": max(options.concurrent),
        "prefill_chunk": options.prefill_chunk,
        "num_blocks": options.num_blocks,
    }


class _Clock:
    """A run's beginning: what others did on the machine since then, and when it must end."""

    def __init__(self, max_seconds: float) -> None:
        from convoy.bench.machine import Watch
        from convoy.bench.throughput import Deadline

        self.deadline = Deadline(max_seconds)
        self._watch = Watch()

    def report(
        self,
        bench: str,
        run: _Run,
        settings: Mapping[str, int],
        rows: list[DecodeRow] | list[PrefillRow],
        ratios: Mapping[str, float],
    ) -> Report:
        from convoy.bench.report import Report

        said: dict[str, int | str | bool] = {
            **settings,
            "pinned": run.pin,
            "kernel": ", ".join(sorted(run.kernels)),
        }
        return Report(bench, self._watch.machine(), run.model, said, tuple(rows), ratios)


@dataclass(frozen=True)
class _Run:
    """What the flags of all these benches say. With ``pin`` a member has the same cores, alone or not."""

    model: str
    kernel: str
    threads: int | None
    max_seconds: float
    pin: bool
    csv: Path | None
    plot: Path | None
    as_json: bool
    cores: tuple[tuple[int, ...], ...] | None = field(init=False)
    kernels: set[str] = field(init=False, default_factory=set)  # that were really used

    def __post_init__(self) -> None:
        object.__setattr__(self, "cores", share_cores(2) if self.pin else None)

    def options(self, members: int, limits: dict[str, int]) -> LocalOptions:
        cores = None if self.cores is None else self.cores[:members]
        return LocalOptions(members, None, self.kernel, self.threads, engine=limits, cores=cores)

    def on(self, members: int, limits: dict[str, int], work: Callable[[Engine, int], T]) -> T:
        """Do it on a fresh cluster: the head in this process, a peer in one of its own."""
        options = self.options(members, limits)
        with LocalCluster(options) as local, pinned(options.head_cores):
            local.start_peers(self.model)
            try:
                cluster = start_cluster(
                    local.config(local.head), self.model, quiet=True, watch=local.check_alive
                )
                try:
                    self.kernels.add(cluster.status().kernel)
                    return work(cluster.engine, cluster.tokenizer.vocab_size)
                finally:
                    cluster.close()
            except ConvoyError as error:
                raise local.explain(error) from error

    def show(self, report: Report, x_name: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
        """To the files that were named, and to standard output."""
        from convoy.bench.plot import plot

        if self.csv is not None:
            replace_file(self.csv, report.csv().encode())
        if self.plot is not None:
            title = f"convoy bench {report.bench}, {report.model}"
            replace_file(self.plot, plot(title, x_name, "tokens/s", lines).encode())
        if self.as_json:
            print_json(report)
        else:
            _print(report)


def _print(report: Report) -> None:
    names = list(type(report.rows[0]).__dataclass_fields__)
    print_table(names, [[getattr(row, name) for name in names] for row in report.rows])
    print()
    for name, value in report.ratios.items():
        print(f"{name} {value:g}")
    print(f"{report.machine.num_cores} cores of {report.machine.cpu}")
    print(f"other processes took {report.machine.others:.0%} of the cores meanwhile")


def _counts(flag: str, text: str, most: int) -> tuple[int, ...]:
    """``1,4,16`` in rising order. Raises UsageError."""
    counts = set()
    for part in text.split(","):
        number = part.strip()
        if not (number.isascii() and number.isdigit()) or not 1 <= int(number[:9]) <= most:
            raise UsageError(f"{flag} has {number!r}, expected numbers from 1 to {most} between commas")
        counts.add(int(number[:9]))
    return tuple(sorted(counts))


def _check_context(model: str, num_tokens: int) -> None:
    """Said before anything is started. Raises UsageError."""
    from convoy.model.source import ModelSource

    most = ModelSource.resolve(model).spec.max_context
    if num_tokens > most:
        raise UsageError(
            f"the bench needs a context of {num_tokens} tokens, and {model} has {most}",
            hint="ask for fewer tokens, requests or windows",
        )
