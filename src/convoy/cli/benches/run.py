"""The common parts of all benches: flags, the measured cluster, and the forms of a report.

A bench is a function with the decorator `bench_verb`. Its first argument is a `BenchRun`, and its own flags
follow.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from convoy.cli.local.pin import PinFlag, pinned, share_cores
from convoy.cli.serve import start_cluster
from convoy.cli.show.output import JsonFlag, print_json, print_note, print_table
from convoy.config.files import replace_file
from convoy.config.kernels import host_kernels_text
from convoy.errors import ConvoyError, UsageError
from convoy.sdk.local_cluster import LocalCluster, LocalOptions

if TYPE_CHECKING:
    from convoy.bench.report.clock import Clock
    from convoy.bench.report.report import Report
    from convoy.cluster.head.head import Head
    from convoy.cluster.options import HeadOptions
    from convoy.cluster.running import RunningCluster

P = ParamSpec("P")
Lines = Mapping[str, Sequence[tuple[float, float]]]

ModelArgument = Annotated[str, typer.Argument(help="A model, as for `convoy run`.")]
KernelFlag = Annotated[str, typer.Option(help=f"{host_kernels_text()}.")]
ThreadsFlag = Annotated[int | None, typer.Option(min=1, help="CPU threads of each member.")]
MaxSecondsFlag = Annotated[float, typer.Option(min=1, help="Give up after this many seconds.")]
CsvFlag = Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this CSV file.")]
PlotFlag = Annotated[Path | None, typer.Option("--plot", help="Also write a plot to this SVG file.")]

# How the best figure is found, by the unit of a plot.
_BEST: dict[str, Callable[[Iterable[float]], float]] = {
    "tokens/s": max,
    "ms for a token": min,
    "ms for a step": min,
}

# Flags of the benches of a model, and flags of every bench.
_MODEL_FLAGS: dict[str, tuple[Any, Any]] = {
    "kernel": (KernelFlag, "auto"),
    "threads": (ThreadsFlag, None),
    "pin": (PinFlag, False),
}
_FLAGS: dict[str, tuple[Any, Any]] = {
    "csv": (CsvFlag, None),
    "plot": (PlotFlag, None),
    "as_json": (JsonFlag, False),
}


def bench_verb(
    *, model: str | None = "synthetic:llama-250m", max_seconds: float = 600.0
) -> Callable[[Callable[Concatenate[BenchRun, P], None]], Callable[..., None]]:
    """Give a bench the flags that all share: MODEL with this default, --max-seconds, --json, --csv, --plot.

    With ``model`` None the bench measures no model, and has no flags about one.
    """
    flags = {"max_seconds": (MaxSecondsFlag, max_seconds), **_FLAGS}
    if model is not None:
        flags = {"model": (ModelArgument, model), **_MODEL_FLAGS, **flags}

    def decorate(verb: Callable[Concatenate[BenchRun, P], None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def command(**given: Any) -> None:
            run = BenchRun(**{name: given.pop(name) for name in flags})
            bound: Callable[..., None] = functools.partial(verb, run)
            bound(**given)

        own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
        kind = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter(name, kind, default=default, annotation=annotation)
            for name, (annotation, default) in flags.items()
        ]
        parameters = [*shared[: model is not None], *(p.replace(kind=kind) for p in own)]
        parameters += shared[model is not None :]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        # `inspect` would follow __wrapped__ to the verb's own signature.
        del command.__dict__["__wrapped__"]
        return command

    return decorate


@dataclass(frozen=True)
class BenchRun:
    """Hold the shared flags. With ``pin`` a member has the same cores, alone or beside another."""

    max_seconds: float
    csv: Path | None
    plot: Path | None
    as_json: bool
    model: str | None = None
    kernel: str = "auto"
    threads: int | None = None
    pin: bool = False
    device: str = "cpu"
    layers: Sequence[str] | None = None
    # The kernels that stages really ran, filled in as clusters start.
    kernels: set[str] = field(init=False, default_factory=set)

    @functools.cached_property
    def clock(self) -> Clock:
        """Return the clock of the run. It starts at the first use, after the flags were checked."""
        from convoy.bench.report.clock import Clock

        return Clock(self.max_seconds)

    @functools.cached_property
    def cores(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the cores of each of two members, None without --pin. Raises UsageError if --pin is
        impossible.
        """
        return share_cores(2) if self.pin else None

    def say(self, text: str) -> None:
        """Print a line about the progress of the run."""
        print_note(text)

    def check_context(self, num_tokens: int) -> None:
        """Raise UsageError, before anything is started, for a model with a context under ``num_tokens``."""
        from convoy.model.checkpoints.source import ModelSource

        most = ModelSource.resolve(self.named_model).spec.max_context
        if num_tokens > most:
            raise UsageError(
                f"the bench needs a context of {num_tokens} tokens, and {self.model} has {most}",
                hint="ask for fewer tokens, requests or windows",
            )

    @property
    def named_model(self) -> str:
        assert self.model is not None, "this bench has no model"
        return self.model

    @property
    def alone_cores(self) -> tuple[int, ...] | None:
        """Return the cores of a lone member: half of all, as each of two members has."""
        return None if self.cores is None else self.cores[0]

    def options(
        self, members: int, limits: dict[str, int], sharing: dict[str, Any] | None = None
    ) -> LocalOptions:
        """Return options for so many members. ``sharing`` is how members share the model, as in [plan]."""
        cores = None if self.cores is None else self.cores[:members]
        # A random model repeats itself, so a bench with guesses would measure these in place of steps.
        engine = {"speculate": 0, **limits}
        return LocalOptions(
            members,
            self.layers,
            self.kernel,
            self.threads,
            engine=engine,
            cores=cores,
            device=self.device,
            sharing={"parallel": "pipeline"} if sharing is None else sharing,
            note=print_note,
        )

    @contextmanager
    def cluster(
        self,
        members: int,
        limits: dict[str, int],
        sharing: dict[str, Any] | None = None,
        model: str | None = None,
    ) -> Iterator[RunningCluster]:
        """Yield a new cluster of ``model``, or of the run's: the head here, and a process for each peer."""
        model = model or self.named_model
        with self._local(members, limits, sharing, model) as local:
            config = local.config(local.head)
            cluster = start_cluster(config, model, quiet=True, watch=local.check_alive)
            try:
                self.kernels.add(cluster.status().kernel)
                yield cluster
            finally:
                cluster.close()

    @contextmanager
    def head(self, members: int, limits: dict[str, int]) -> Iterator[tuple[Head, HeadOptions]]:
        """Yield a head without an engine, and its options: the bench drives the executor or an own engine."""
        from convoy.cli.running.member import load_head
        from convoy.cluster.head.head import Head
        from convoy.model.checkpoints.source import ModelSource
        from convoy.sdk.options import head_options

        with self._local(members, limits, None, self.named_model) as local:
            config = local.config(local.head)
            options = head_options(config)
            source = ModelSource.resolve(self.named_model)
            head = Head(load_head(config), source, options, watch=local.check_alive)
            try:
                self.kernels.add(head.bring_up().plan.kernel)
                yield head, options
            finally:
                head.close()

    @contextmanager
    def _local(
        self, members: int, limits: dict[str, int], sharing: dict[str, Any] | None, model: str
    ) -> Iterator[LocalCluster]:
        options = self.options(members, limits, sharing)
        with LocalCluster(options) as local, pinned(options.head_cores):
            local.start_peers(model)
            try:
                yield local
            except ConvoyError as error:
                local.reraise(error)

    def report(
        self,
        bench: str,
        settings: Mapping[str, int | float | str | bool],
        rows: Sequence[Any],
        ratios: Mapping[str, float],
    ) -> Report:
        """Return the report, with the machine's load meanwhile. Call it after the measured processes have
        ended.
        """
        from convoy.bench.report.report import Report

        said = dict(settings)
        if self.model is not None:
            said |= {"pinned": self.pin, "kernel": ", ".join(sorted(self.kernels))}
        return Report(bench, self.clock.machine(), self.model, said, tuple(rows), ratios)

    def show(
        self,
        report: Report,
        axes: tuple[str, str],
        lines: Lines,
        table: Callable[[Report], None] | None = None,
    ) -> None:
        """Write the report to the named files and to standard output. ``axes`` name x and y of the plot."""
        from convoy.bench.report.plot import plot

        if self.csv is not None:
            replace_file(self.csv, report.csv().encode())
        if self.plot is not None:
            title = f"convoy bench {report.bench}" + (f", {report.model}" if report.model else "")
            replace_file(self.plot, plot(title, *axes, lines).encode())
        if self.as_json:
            print_json(report)
            return
        if told := headline(axes[1], lines):
            print(told)
        (table or print_rows)(report)


def headline(unit: str, lines: Lines) -> str:
    """Return the best figure of each line of a plot in one sentence; "" for a unit without a best."""
    best = _BEST.get(unit)
    if best is None:
        return ""
    parts = (f"{name} {best(value for _, value in points):.3g}" for name, points in lines.items() if points)
    return f"at best, in {unit}: {', '.join(parts)}"


def print_rows(report: Report) -> None:
    """Print tables of the rows, then the ratios and the machine's load."""
    for rows in report.tables():
        names = list(type(rows[0]).__dataclass_fields__)
        print_table(names, [[getattr(row, name) for name in names] for row in rows])
        print()
    for name, value in report.ratios.items():
        print(f"{name} {value:g}")
    print_machine(report)


def print_machine(report: Report) -> None:
    print(f"{report.machine.num_cores} cores of {report.machine.cpu}")
    print(f"other processes took {report.machine.others:.0%} of the cores meanwhile")


def counts(flag: str, text: str, most: int, *, least: int = 1) -> tuple[int, ...]:
    """Return the numbers of ``1,4,16`` in rising order. Raises UsageError."""
    found = set()
    for part in text.split(","):
        number = part.strip()
        if not (number.isascii() and number.isdigit()) or not least <= int(number[:9]) <= most:
            raise UsageError(f"{flag} has {number!r}, expected numbers from {least} to {most} between commas")
        found.add(int(number[:9]))
    return tuple(sorted(found))
