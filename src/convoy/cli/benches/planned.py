"""``convoy bench plan``: predicted rates beside measured ones, by form of the files and by members."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.formats import RoundsFlag, chosen_forms
from convoy.cli.benches.run import BenchRun, bench_verb, counts
from convoy.cli.benches.throughput import ConcurrentFlag, ContextFlag, TokensFlag, WindowsFlag
from convoy.cli.local.pin import pinned
from convoy.config.kernels import AUTO, EXACT, PLAIN, QUANTIZED, computing_kernel
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
_NEAR = "within 25 %"
_DECODE, _PREFILL = "decode", "prefill"
# The forms on hosts and on CUDA. A word behind `_WITH` is computed or rounded.
_FORMS, _CUDA_FORMS = "F32,BF16,Q8_0,Q4_0", "BF16,BF16+q8,BF16+q4"
_WITH, _INT8 = "+", "int8"
# By what is measured and the sequences at once, or the tokens of the prompt: tokens/s.
_Rates = dict[tuple[str, int], float]


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """Hold a predicted rate in tokens/s, the one measured in the same minute, and the first over the second.

    ``verdict`` says on which side of a quarter the prediction lies.
    """

    form: str
    members: int
    what: str
    # Sequences at once, or tokens of the prompt.
    number: int
    predicted: float
    measured: float
    ratio: float
    verdict: str


@bench_verb(max_seconds=3600)
def plan(
    run: BenchRun,
    forms: Annotated[
        str,
        typer.Option(
            help="Forms of files between commas, as for `bench formats`; +int8 computes with 8-bit rows, +q8 "
            "and +q4 round as --quantize does.  [default: F32,BF16,Q8_0,Q4_0; on CUDA BF16,BF16+q8,BF16+q4]"
        ),
    ] = "",
    members: Annotated[str, typer.Option(help="Numbers of members.")] = "1,2",
    concurrent: ConcurrentFlag = "1,8",
    context: ContextFlag = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 1024,
    windows: WindowsFlag = 3,
    tokens: TokensFlag = 8,
    rounds: RoundsFlag = 2,
    device: Annotated[str, typer.Option(help="The device of every member, like cuda:0.")] = "cpu",
) -> None:
    """Compare the predictions of `convoy plan` with running members.

    Each prediction has a measurement of this machine of its own, made just before the members start, and the
    round trip that their links measure.
    """
    from convoy.bench.throughput import TURN_TOKENS, DecodeOptions, PrefillOptions
    from convoy.config.table import DEVICE_CHUNK, HOST_CHUNK

    sizes, at_once = counts("--members", members, 2), counts("--concurrent", concurrent, _MAX_CONCURRENT)
    on_host = device == "cpu"
    chunk = HOST_CHUNK if on_host else DEVICE_CHUNK
    decode = DecodeOptions(at_once, context, windows, tokens, chunk)
    prefill = PrefillOptions(prompt_tokens, chunk, max(sizes), rounds)
    if not on_host:
        from convoy.model.device import choose_devices

        choose_devices(device)
    run = dataclasses.replace(run, device=device)
    ways = _ways(run, forms or (_FORMS if on_host else _CUDA_FORMS))
    if run.kernel not in {AUTO, EXACT, PLAIN}:
        raise UsageError(
            f"--kernel is {run.kernel}, and forms of files are compared",
            hint=f"leave --kernel out, or take {EXACT} or {PLAIN}",
        )
    run.check_context(max(context + decode.max_tokens, prompt_tokens + TURN_TOKENS + 1))
    rows = [row for name, way in ways.items() for row in _rows_of(name, _Bench(way, decode, prefill), sizes)]
    for way in ways.values():
        run.kernels.update(way.kernels)
    near = sum(row.verdict == _NEAR for row in rows) / len(rows)
    settings = {"context": context, "prompt_tokens": prompt_tokens, "windows": windows, "rounds": rounds}
    said: dict[str, int | float | str | bool] = {**settings, "device": device}
    report = run.report("plan", said, rows, {"within_a_quarter": round(near, 3)})
    lines = {name: [(row.measured, row.predicted) for row in rows if row.form == name] for name in ways}
    run.show(report, ("measured, tokens/s", "predicted, tokens/s"), lines)


def _rows_of(name: str, bench: _Bench, sizes: Sequence[int]) -> list[PredictionRow]:
    """Write the model in the form ``name`` and return the rows of clusters of ``sizes`` members."""
    from convoy.bench.forms.files import write_form
    from convoy.model.checkpoints.source import ModelSource

    form, run = name.partition(_WITH)[0], bench.run
    with temporary_folder() as folder:
        run.say(f"writing {run.named_model} as {form}")
        path = write_form(ModelSource.resolve(run.named_model), form, folder)
        return [row for size in sizes for row in bench.pairs(name, path, size)]


def _ways(run: BenchRun, texts: str) -> dict[str, BenchRun]:
    """Return a run for each form, like ``Q4_0`` or ``Q4_0+int8``, with its kernel. Raises UsageError."""
    found: dict[str, BenchRun] = {}
    for text in texts.split(","):
        name = text.strip()
        form, _, word = name.partition(_WITH)
        chosen_forms(form)
        if word not in {"", _INT8, *QUANTIZED}:
            raise UsageError(
                f"--forms has {name[:40]!r}, expected {_INT8}, {' or '.join(QUANTIZED)} behind {_WITH}",
                hint=f"{form}{_WITH}{_INT8}",
            )
        if word and run.kernel != AUTO:
            raise UsageError(f"--forms has {name}, and --kernel is {run.kernel}", hint="leave out --kernel")
        kernel = computing_kernel(AUTO, _INT8) if word == _INT8 else QUANTIZED.get(word, run.kernel)
        found[name] = dataclasses.replace(run, kernel=kernel)
    return found


def _verdict(ratio: float) -> str:
    """Return whether a prediction is within a quarter of the measurement, or on which side it is not."""
    if abs(ratio - 1) <= _WITHIN:
        return _NEAR
    return "too high" if ratio > 1 else "too low"


@dataclass(frozen=True)
class _Bench:
    """Predict and measure a model's rates in one form on so many members."""

    run: BenchRun
    decode: DecodeOptions
    prefill: PrefillOptions

    def pairs(self, form: str, path: Path, members: int) -> list[PredictionRow]:
        """Return the pairs of all counts of sequences, and of the prompt."""
        predict = self._prepare(path, members)
        measured, trip_s = self._measure(path, members)
        predicted = predict(trip_s)
        rows = []
        for (what, number), rate in measured.items():
            expected = predicted[what, number]
            ratio = round(expected / rate, 3)
            verdict = _verdict(ratio)
            rows.append(PredictionRow(form, members, what, number, round(expected, 2), rate, ratio, verdict))
            self.run.say(
                f"{form}, members {members}, {what} {number}: predicted {expected:.1f}, measured {rate:.1f} "
                f"tokens/s, ratio {ratio:.2f}: {verdict}"
            )
        return rows

    def _prepare(self, path: Path, members: int) -> Callable[[float | None], _Rates]:
        """Measure this machine, and return a function that predicts the rates for a measured round trip."""
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
            # This measures; later calls find the result.
            self._rates(asked, found, source, measurements, self.prefill.num_tokens, 1)

        def predict(trip_s: float | None) -> _Rates:
            if trip_s is not None:
                measurements.trip_flags = [str(1e3 * trip_s)]
            rates: _Rates = {}
            for number in self.decode.concurrent:
                of = self._rates(asked, found, source, measurements, self.decode.context, number)
                rates[_DECODE, number] = (of.decode if number == 1 else of.decode_batch).tokens_per_s
            prompt = self._rates(asked, found, source, measurements, self.prefill.num_tokens, 1)
            rates[_PREFILL, self.prefill.num_tokens] = prompt.prefill.tokens_per_s
            return rates

        return predict

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

    def _measure(self, path: Path, members: int) -> tuple[_Rates, float | None]:
        """Return the rates of running members, and the longest round trip of their links, if there is one."""
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
            # Known once a ping has come back; a head has none to itself.
            stages = cluster.status().stages
            trips = [one.round_trip_s for one in stages if not one.head and one.round_trip_s]
            first = measure_prefill(
                cluster.engine, size, members, self.prefill, deadline=deadline, say=lambda _: None
            )
            rows = measure_decode(
                cluster.engine, size, members, self.decode, deadline=deadline, say=lambda _: None
            )
        rates: _Rates = {(_DECODE, row.concurrent): row.tokens_per_s for row in rows}
        rates[_PREFILL, self.prefill.num_tokens] = first.tokens_per_s
        return rates, max(trips, default=None)
