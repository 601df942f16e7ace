"""``convoy bench formats``: one model's memory and speed in each form in which files hold weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb, counts, print_machine
from convoy.cli.show.output import print_table
from convoy.config.temporary_folder import temporary_folder
from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.bench.forms.rates import FormRow, RateOptions, RateRow, Rates, Way
    from convoy.bench.report.report import Report

_MAX_CONCURRENT = 64
_ALL = "all"

FormsFlag = Annotated[str, typer.Option(help="Forms between commas; all: every known one.")]
ConcurrentFlag = Annotated[str, typer.Option(help="Counts of sequences that decode at once.")]
ContextFlag = Annotated[int, typer.Option(min=1, help="Tokens of each sequence before its decodes.")]
PromptFlag = Annotated[int, typer.Option(min=0, help="Tokens of the prefill; 0: none.")]
StepsFlag = Annotated[int, typer.Option(min=1, help="Measured steps for each count and round.")]
RoundsFlag = Annotated[int, typer.Option(min=1, help="Rounds, in each of which every form has a turn.")]


@bench_verb(max_seconds=1800)
def formats(
    run: BenchRun,
    forms: FormsFlag = _ALL,
    concurrent: ConcurrentFlag = "1,4,16",
    context: ContextFlag = 64,
    prompt_tokens: PromptFlag = 1024,
    steps: StepsFlag = 16,
    rounds: RoundsFlag = 3,
    members: Annotated[int, typer.Option(min=1, max=2, help="2: over a sealed link, without prefill.")] = 1,
) -> None:
    """Compare bytes and speed of one model in all forms of files.

    The files hold random codes. Other forms are compared with the first one.
    """
    from convoy.bench.forms.rates import RateOptions, take_turns

    names = chosen_forms(forms)
    sizes = counts("--concurrent", concurrent, _MAX_CONCURRENT)
    options = RateOptions(sizes, context, prompt_tokens if members == 1 else 0, steps, rounds)
    run.check_context(max(options.max_tokens, options.prompt_tokens))
    with opened_forms(run, options) as opened:
        ways: list[Way] = []
        for name in names:
            way = opened.stage(name) if members == 1 else opened.engine(name)
            ways.append(replace(way, over=ways[0]) if ways else way)
        rows = take_turns(ways, rounds, run.clock.deadline, run.say)
    lines = {
        name: [
            (float(row.number), row.tokens_per_s) for row in rows if (row.form, row.what) == (name, "decode")
        ]
        for name in names
    }
    report = run.report("formats", settings_of(run, options), [*opened.sizes, *rows], {})
    run.show(report, ("decodes at once", "tokens/s"), lines, print_forms)


def chosen_forms(text: str, known: tuple[str, ...] | None = None) -> list[str]:
    """Return the forms of ``A,B``, or all ``known`` ones. Raises UsageError for another."""
    from convoy.bench.forms.files import FORMS

    every = list(known or FORMS)
    if text == _ALL:
        return every
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in every:
            raise UsageError(f"--forms has {name!r}, expected some of {', '.join(every)} between commas")
    return list(dict.fromkeys(asked))


def num_threads(run: BenchRun) -> int:
    """Return the threads of one member: as asked, or one for each core that this process may use."""
    if run.threads:
        return run.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settings_of(run: BenchRun, options: RateOptions) -> dict[str, int | float | str | bool]:
    """Return the settings of a report."""
    return {
        "context": options.context,
        "steps": options.steps,
        "rounds": options.rounds,
        "threads": num_threads(run),
    }


@dataclass
class OpenedForms:
    """Hold the files of a model in several forms, and the stages and clusters that run them."""

    run: BenchRun
    options: RateOptions
    folder: Path
    stack: ExitStack
    sizes: list[FormRow] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)

    def path(self, form: str) -> Path:
        """Return the file or folder of a form. The first call writes it; raises as `write_form` does."""
        from convoy.bench.forms.files import write_form
        from convoy.model.checkpoints.source import ModelSource

        if form not in self.paths:
            self.run.say(f"writing {self.run.named_model} as {form}")
            folder = self.folder / form
            folder.mkdir()
            self.paths[form] = write_form(ModelSource.resolve(self.run.named_model), form, folder)
        return self.paths[form]

    def stage(self, form: str) -> Way:
        """Load the model in a form as one stage, and return the way that measures it."""
        from convoy.bench.forms.files import stored_bytes
        from convoy.bench.forms.rates import FormRow, StageRates, Way
        from convoy.bench.report.report import STAGE
        from convoy.model.checkpoints.source import ModelSource

        path = self.path(form)
        source = ModelSource.resolve(str(path))
        stage = StageRates(source, self.run.kernel, num_threads(self.run), self.options)
        self.run.kernels.add(stage.kernel)
        stored, resident = stored_bytes(path), stage.resident_bytes
        self.sizes.append(FormRow(form, stored, resident, round(resident / stored, 3)))
        self.run.say(f"{form}: {stored / 1e6:.1f} MB stored, {resident / 1e6:.1f} MB in memory")
        return Way(form, STAGE, 1, stage.measure)

    def engine(self, form: str) -> Way:
        """Start two members that share the model in a form, and return the way that measures decodes."""
        from convoy.bench.forms.rates import Way
        from convoy.bench.report.report import ENGINE

        self.run.say(f"starting two members with {form}")
        return Way(form, ENGINE, 2, self.stack.enter_context(self._cluster(self.path(form))))

    @contextmanager
    def _cluster(self, path: Path) -> Iterator[Callable[[], Rates]]:
        from convoy.bench.forms.rates import engine_rates
        from convoy.bench.throughput import DecodeOptions

        asked = self.options
        options = DecodeOptions(asked.concurrent, asked.context, num_windows=1, window_tokens=asked.steps)
        limits = {
            "max_batch": max(options.concurrent),
            "prefill_chunk": options.prefill_chunk,
            "num_blocks": options.num_blocks,
        }
        with self.run.cluster(2, limits, model=str(path)) as cluster:
            size = cluster.tokenizer.vocab_size
            yield lambda: engine_rates(cluster.engine, size, 2, options, self.run.clock.deadline)


@contextmanager
def opened_forms(run: BenchRun, options: RateOptions) -> Iterator[OpenedForms]:
    """Yield forms whose files and clusters end with the block."""
    with temporary_folder() as folder, ExitStack() as stack:
        yield OpenedForms(run, options, folder, stack)


def print_forms(report: Report) -> None:
    """Print a line for each way with its bytes and rates, then the machine's load."""
    from convoy.bench.forms.rates import FormRow, RateRow
    from convoy.bench.report.report import STAGE

    sizes = {row.form: row for row in report.rows if isinstance(row, FormRow)}
    ways: dict[tuple[str, str, int], dict[str, RateRow]] = {}
    for row in report.rows:
        if isinstance(row, RateRow):
            ways.setdefault((row.form, row.through, row.members), {})[f"{row.what} {row.number}"] = row
    columns = list(dict.fromkeys(column for own in ways.values() for column in own))
    lines = []
    for (form, through, members), own in ways.items():
        size = sizes.get(form) if through == STAGE else None
        memory = "" if size is None else f"{size.resident_bytes / 1e6:.1f} MB"
        lines.append([form, through, members, memory, *(_shown(own.get(column)) for column in columns)])
    print_table(["form", "through", "members", "memory", *columns], lines)
    for over in dict.fromkeys(row.over for own in ways.values() for row in own.values() if row.over):
        print(f"in brackets: times the tokens/s of {over}")
    print_machine(report)


def _shown(row: RateRow | None) -> str:
    if row is None:
        return ""
    return f"{row.tokens_per_s:.1f} ({row.times:.2f})" if row.over else f"{row.tokens_per_s:.1f}"
