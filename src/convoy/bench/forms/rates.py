"""Measure decodes and a prefill of several models in turn, and compare their rates round by round."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from convoy.bench.floor import Decodes, load_whole
from convoy.bench.report.clock import Deadline
from convoy.bench.throughput import DecodeOptions, Say, measure_decode
from convoy.config.table import HOST_CHUNK
from convoy.engine.engine import Engine
from convoy.model.checkpoints.source import ModelSource

DECODE, PREFILL = "decode", "prefill"
# Tokens per second, by `DECODE` and the sequences at once, or by `PREFILL` and the tokens of the prompt.
Rates = Mapping[tuple[str, int], float]
Measure = Callable[[], Rates]


@dataclass(frozen=True, slots=True)
class FormRow:
    """Hold the bytes of a model's weights in one form: in its file, and in memory once loaded."""

    form: str
    stored_bytes: int
    resident_bytes: int
    of_stored: float


@dataclass(frozen=True, slots=True)
class RateRow:
    """Hold the median rate of all rounds, of decodes or of a prefill.

    ``times`` is the median, round by round, of the rate over that of ``over``; 0 without another to compare
    with. ``number`` counts the sequences at once, or the tokens of the prompt.
    """

    form: str
    through: str
    members: int
    what: str
    number: int
    tokens_per_s: float
    over: str
    times: float


@dataclass(frozen=True, slots=True)
class RateOptions:
    """Hold the options: a prompt of ``prompt_tokens``, then ``steps`` decodes of each count behind
    ``context`` tokens. 0 tokens leave the prompt out.
    """

    concurrent: tuple[int, ...]
    context: int
    prompt_tokens: int
    steps: int
    rounds: int

    @property
    def max_tokens(self) -> int:
        """Return the tokens of one decoding sequence. All counts start at the same context."""
        # One step of each count warms the caches.
        return self.context + self.steps + 1


class StageRates:
    """Hold a model as one stage of this process, and measure its steps."""

    def __init__(
        self, source: ModelSource, kernel: str, num_threads: int | None, options: RateOptions
    ) -> None:
        """Load the model. Raises as `HostStage.load`."""
        self._stage = load_whole(source, kernel, num_threads)
        self._options = options
        most, prompt = max(options.concurrent), options.prompt_tokens
        self._decodes = Decodes(self._stage, most, options.max_tokens, prompt)
        self._decodes.read(options.context)

    @property
    def kernel(self) -> str:
        return self._stage.options.kernel

    @property
    def resident_bytes(self) -> int:
        return self._stage.weight_bytes

    @torch.inference_mode()
    def measure(self) -> Rates:
        """Measure the prompt, then decodes of each count."""
        found: dict[tuple[str, int], float] = {}
        options, decodes = self._options, self._decodes
        if options.prompt_tokens:
            started_s = time.perf_counter()
            decodes.prefill(options.prompt_tokens, HOST_CHUNK)
            took_s = time.perf_counter() - started_s
            found[PREFILL, options.prompt_tokens] = options.prompt_tokens / took_s
        for count in options.concurrent:
            decodes.lengths[:count] = [options.context] * count
            decodes.step(count)
            started_s = time.perf_counter()
            for _ in range(options.steps):
                decodes.step(count)
            found[DECODE, count] = count * options.steps / (time.perf_counter() - started_s)
        return found


def engine_rates(
    engine: Engine, vocab_size: int, members: int, options: DecodeOptions, deadline: Deadline
) -> Rates:
    """Measure decodes of each count through a running engine. Raises ConvoyError at the deadline."""
    rows = measure_decode(engine, vocab_size, members, options, deadline=deadline, say=lambda _: None)
    return {(DECODE, row.concurrent): row.tokens_per_s for row in rows}


@dataclass(frozen=True)
class Way:
    """Describe a way to run a model in one form: ``measure`` runs one round of it.

    ``over`` is the way that it is compared with.
    """

    form: str
    through: str
    members: int
    measure: Measure
    over: Way | None = None

    def __str__(self) -> str:
        return f"{self.form} through {self.through}"


def take_turns(ways: Sequence[Way], rounds: int, deadline: Deadline, say: Say) -> list[RateRow]:
    """Measure each way in every round, so that other load on the machine affects all of them alike.

    Raises ConvoyError at the deadline.
    """
    measured: list[list[Rates]] = [[] for _ in ways]
    for number, (way, found) in itertools.product(range(rounds), list(zip(ways, measured, strict=True))):
        deadline.left_s()
        found.append(way.measure())
        shown = ", ".join(f"{what} {count}: {rate:.1f}" for (what, count), rate in found[-1].items())
        say(f"round {number + 1} of {rounds}, {way}: {shown} tokens/s")
    by_way = dict(zip(map(id, ways), measured, strict=True))
    return [
        _row(way, what, count, found, by_way.get(id(way.over), []))
        for way, found in zip(ways, measured, strict=True)
        for what, count in found[0]
    ]


def _row(way: Way, what: str, count: int, rounds: Sequence[Rates], others: Sequence[Rates]) -> RateRow:
    pairs = [
        (rates[what, count], other[what, count])
        for rates, other in zip(rounds, others, strict=False)
        if (what, count) in other
    ]
    rate = statistics.median(rates[what, count] for rates in rounds)
    times = statistics.median(own / other for own, other in pairs) if pairs else 0.0
    over = ""
    if pairs and way.over is not None:
        over = way.over.through if way.over.form == way.form else str(way.over)
    return RateRow(*(way.form, way.through, way.members, what, count), round(rate, 2), over, round(times, 3))
