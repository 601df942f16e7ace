"""``convoy bench plan``: predicted rates beside measured ones, by form of the files and by members."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.formats import FormsFlag, RoundsFlag, chosen_forms
from convoy.cli.benches.run import BenchRun, bench_verb, counts
from convoy.cli.benches.throughput import ConcurrentFlag, ContextFlag, TokensFlag, WindowsFlag
from convoy.cli.local.pin import pinned
from convoy.config.kernels import AUTO, EXACT, PLAIN
from convoy.config.settings import Config, override
from convoy.config.temporary_folder import temporary_folder
from convoy.errors import UsageError
from convoy.sdk.names import local_names
from convoy.sdk.planning.planning import PlanQuestion, plan_source

if TYPE_CHECKING:
    from convoy.bench.throughput import DecodeOptions, PrefillOptions
    from convoy.model.checkpoints.source import ModelSource
    from convoy.plan.rates.rates import RatesReport
    from convoy.sdk.planning.members import PlanMembers
    from convoy.sdk.planning.speeds import Measurements

_MAX_CONCURRENT = 64
# The share of the measured rate by which a prediction may miss.
_WITHIN = 0.25
_DECODE, _PREFILL = "decode", "prefill"
# By what is measured and the sequences at once, or the tokens of the prompt: tokens/s.
_Rates = dict[tuple[str, int], float]


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """Hold a predicted rate in tokens/s, the one measured right after it, and the first over the second."""

    form: str
    members: int
    what: str
    # Sequences at once, or tokens of the prompt.
    number: int
    predicted: float
    measured: float
    ratio: float


@bench_verb(max_seconds=3600)
def plan(
    run: BenchRun,
    forms: FormsFlag = "F32,BF16,Q8_0,Q4_0",
    members: Annotated[str, typer.Option(help="Numbers of members.")] = "1,2",
    concurrent: ConcurrentFlag = "1,8",
    context: ContextFlag = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 1024,
    windows: WindowsFlag = 3,
    tokens: TokensFlag = 8,
    rounds: RoundsFlag = 2,
) -> None:
    """Compare the predictions of `convoy plan` with running members.

    Each prediction has a measurement of this machine of its own, made just before the members start.
    """
    from convoy.bench.forms.files import write_form
    from convoy.bench.throughput import TURN_TOKENS, DecodeOptions, PrefillOptions
    from convoy.config.table import HOST_CHUNK
    from convoy.model.checkpoints.source import ModelSource

    sizes, at_once = counts("--members", members, 2), counts("--concurrent", concurrent, _MAX_CONCURRENT)
    decode = DecodeOptions(at_once, context, windows, tokens, HOST_CHUNK)
    prefill = PrefillOptions(prompt_tokens, HOST_CHUNK, max(sizes), rounds)
    names = chosen_forms(forms)
    if run.kernel not in {AUTO, EXACT, PLAIN}:
        raise UsageError(
            f"--kernel is {run.kernel}, and forms of files are compared",
            hint=f"leave --kernel out, or take {EXACT} or {PLAIN}",
        )
    run.check_context(max(context + decode.max_tokens, prompt_tokens + TURN_TOKENS + 1))
    bench = _Bench(run, decode, prefill)
    rows: list[PredictionRow] = []
    for form in names:
        with temporary_folder() as folder:
            run.say(f"writing {run.named_model} as {form}")
            path = write_form(ModelSource.resolve(run.named_model), form, folder)
            for size in sizes:
                rows += bench.pairs(form, path, size)
    near = sum(abs(row.ratio - 1) <= _WITHIN for row in rows) / len(rows)
    settings = {"context": context, "prompt_tokens": prompt_tokens, "windows": windows, "rounds": rounds}
    report = run.report("plan", settings, rows, {"within_a_quarter": round(near, 3)})
    lines = {name: [(row.measured, row.predicted) for row in rows if row.form == name] for name in names}
    run.show(report, ("measured, tokens/s", "predicted, tokens/s"), lines)


@dataclass(frozen=True)
class _Bench:
    """Predict and measure a model's rates in one form on so many members."""

    run: BenchRun
    decode: DecodeOptions
    prefill: PrefillOptions

    def pairs(self, form: str, path: Path, members: int) -> list[PredictionRow]:
        """Return the pairs of all counts of sequences, and of the prompt."""
        predicted = self._predict(path, members)
        measured = self._measure(path, members)
        rows = []
        for (what, number), rate in measured.items():
            expected = predicted[what, number]
            ratio = round(expected / rate, 3)
            rows.append(PredictionRow(form, members, what, number, round(expected, 2), rate, ratio))
            self.run.say(
                f"{form}, members {members}, {what} {number}: predicted {expected:.1f}, measured {rate:.1f} "
                f"tokens/s, {ratio:.2f} of it"
            )
        return rows

    def _predict(self, path: Path, members: int) -> _Rates:
        from convoy.model.checkpoints.source import ModelSource

        source = ModelSource.resolve(str(path))
        here = tuple((name, None) for name in local_names(members))
        threads = self.run.options(members, {}).threads
        model = override(Config().model, device=self.run.device)
        asked = PlanQuestion(
            override(Config(), model=model),
            members=here,
            kernel=self.run.kernel,
            threads=threads,
            note=self.run.say,
        )
        found = asked.find_members()
        # No cache: earlier measurements would stand for a machine that was less busy.
        measurements = dataclasses.replace(asked.measurements(found), cache=None)
        with pinned(self.run.alone_cores):
            prompt = self._rates(asked, found, source, measurements, self.prefill.num_tokens, 1)
        rates: _Rates = {}
        for number in self.decode.concurrent:
            of = self._rates(asked, found, source, measurements, self.decode.context, number)
            rates[_DECODE, number] = (of.decode if number == 1 else of.decode_batch).tokens_per_s
        rates[_PREFILL, self.prefill.num_tokens] = prompt.prefill.tokens_per_s
        return rates

    @staticmethod
    def _rates(
        asked: PlanQuestion,
        members: PlanMembers,
        source: ModelSource,
        measurements: Measurements,
        context: int,
        at_once: int,
    ) -> RatesReport:
        """Return the rates of ``at_once`` sequences of ``context`` tokens. They are measured once."""
        engine = override(asked.settings.engine, max_batch=at_once)
        plan = override(asked.settings.plan, parallel="pipeline" if len(members.offers) > 1 else "auto")
        settings = override(asked.settings, engine=engine, plan=plan)
        report = plan_source(
            dataclasses.replace(asked, settings=settings, context=context), members, source, measurements
        )
        assert report.rates is not None, "the question asks for rates"
        return report.rates

    def _measure(self, path: Path, members: int) -> _Rates:
        from convoy.bench.bare import BLOCK_SIZE
        from convoy.bench.throughput import TURN_TOKENS, measure_decode, measure_prefill

        prompt = -(-(self.prefill.num_tokens + TURN_TOKENS + 1) // BLOCK_SIZE) + 1
        limits = {
            "max_batch": max(self.decode.concurrent),
            "prefill_chunk": self.decode.prefill_chunk,
            "num_blocks": max(self.decode.num_blocks, prompt),
        }
        run, deadline = self.run, self.run.clock.deadline
        with run.cluster(members, limits, model=str(path)) as cluster:
            size = cluster.tokenizer.vocab_size
            first = measure_prefill(
                cluster.engine, size, members, self.prefill, deadline=deadline, say=lambda _: None
            )
            rows = measure_decode(
                cluster.engine, size, members, self.decode, deadline=deadline, say=lambda _: None
            )
        rates: _Rates = {(_DECODE, row.concurrent): row.tokens_per_s for row in rows}
        rates[_PREFILL, self.prefill.num_tokens] = first.tokens_per_s
        return rates
