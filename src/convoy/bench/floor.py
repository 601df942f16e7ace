"""Measure how near a decode step comes to the limit of the memory.

The floor of a step is the bytes of weights that it reads, divided by the rate at which this machine reads
memory with the same threads and almost no work. A virtual machine's memory rate changes by the second. So
every step has a read of its own beside it, and is compared with that one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from convoy.bench.bare import BLOCK_SIZE, num_blocks, whole
from convoy.bench.report.clock import Deadline
from convoy.config.table import ENGINE
from convoy.model.backends.host.checks.selfcheck import choose_kernel
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.linear import PackedLinear, padded_count
from convoy.model.sampling.output_rows import GREEDY, sample_all
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import BlockGrant, Row, Step

READ_BYTES = 256 << 20
_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class FloorRow:
    """Hold steps of ``concurrent`` decodes. ``of_floor`` is the median of floor over time, step by step."""

    kernel: str
    concurrent: int
    # Of each sequence at the end.
    context_tokens: int
    step_bytes: int
    read_gb_per_s: float
    floor_ms: float
    step_ms: float
    tokens_per_s: float
    of_floor: float


@dataclass(frozen=True, slots=True)
class LinearRow:
    """Hold all linears of one shape, one after the other, with the rows of ``concurrent`` decodes."""

    kernel: str
    concurrent: int
    inputs: int
    outputs: int
    number: int
    ms: float
    gb_per_s: float
    of_read: float


@dataclass(frozen=True, slots=True)
class FloorOptions:
    """Hold the options: `context` tokens of prompt, then ``steps`` decodes of each count."""

    concurrent: tuple[int, ...]
    context: int
    steps: int

    @property
    def max_tokens(self) -> int:
        """Return the tokens of one sequence. All counts continue the same sequences."""
        return self.context + len(self.concurrent) * (self.steps + _WARM_STEPS)


class MemoryRead:
    """Read memory at full rate: torch's threads sum a buffer that no cache holds."""

    def __init__(self, deadline: Deadline, num_bytes: int = READ_BYTES) -> None:
        self._numbers = torch.ones(num_bytes // 4)
        self._deadline = deadline

    def beside(self, run: Callable[[], None], times: int) -> tuple[list[float], list[float]]:
        """Return the seconds of each run, and the bytes/s of the read before it.

        Raises ConvoyError at the deadline.
        """
        seconds, rates = [], []
        for _ in range(times):
            self._deadline.left_s()
            started_s = time.perf_counter()
            self._numbers.sum()
            between_s = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - between_s)
            # The read comes directly before the run, because the memory's rate changes by the second.
            rates.append(self._numbers.nbytes / (between_s - started_s))
        return seconds, rates


class Decodes:
    """Decode ``most`` sequences of ``max_tokens`` side by side, greedily, on a stage with the whole model.

    One more sequence, the last, has room for a prompt of ``prompt_tokens``.
    """

    def __init__(self, stage: HostStage, most: int, max_tokens: int, prompt_tokens: int = 0) -> None:
        self._stage, self._number = stage, 0
        sizes = [num_blocks(max_tokens)] * most + [num_blocks(prompt_tokens)] * (prompt_tokens > 0)
        ends = list(itertools.accumulate(sizes))
        stage.make_pools(ends[-1])
        self._grants = [
            BlockGrant.append(sequence, group, list(range(end - size, end)))
            for sequence, (end, size) in enumerate(zip(ends, sizes, strict=True))
            for group in range(len(stage.block_bytes))
        ]
        self._most = most
        self._tokens = [0] * len(sizes)
        self.lengths = [0] * len(sizes)

    def read(self, num_tokens: int) -> None:
        """Run a random prompt for every sequence, one after the other."""
        rng = torch.Generator().manual_seed(1)
        for sequence in range(self._most):
            prompt = torch.randint(self._stage.vocab_size, (num_tokens,), generator=rng)
            self._run([sequence], prompt, num_tokens)

    def prefill(self, num_tokens: int, chunk: int) -> None:
        """Run a random prompt in chunks as the last sequence, from its first position on."""
        rng = torch.Generator().manual_seed(2)
        last = len(self.lengths) - 1
        self.lengths[last] = 0
        prompt = torch.randint(self._stage.vocab_size, (num_tokens,), generator=rng)
        for start in range(0, num_tokens, chunk):
            part = prompt[start : start + chunk]
            self._run([last], part, len(part), num_outputs=int(start + chunk >= num_tokens))

    def step(self, count: int) -> None:
        """Decode one token of the first ``count`` sequences."""
        self._run(range(count), torch.tensor(self._tokens[:count]), 1)

    def _run(
        self, sequences: Sequence[int], tokens: torch.Tensor, each: int, *, num_outputs: int = 1
    ) -> None:
        rows = [Row(sequence, self.lengths[sequence], each, num_outputs) for sequence in sequences]
        encoded = tokens.numpy().astype("<u4").tobytes()
        step = Step(self._number, [], self._grants, rows, encoded)
        hidden = self._stage.run(step, hidden=None, tokens=tokens)
        if num_outputs:
            logits = self._stage.output(self._stage.select(step, hidden))
            outcomes = sample_all(logits.numpy().astype(np.float32, copy=False), [GREEDY] * len(rows))
            for sequence, outcome in zip(sequences, outcomes, strict=True):
                self._tokens[sequence] = outcome.sampled.token_id
        for sequence in sequences:
            self.lengths[sequence] += each
        self._number, self._grants = self._number + 1, []


def load_whole(
    source: ModelSource, kernel: str, num_threads: int | None, kv_dtype: str = ENGINE.kv_dtype
) -> HostStage:
    """Load the model as one stage that needs no prefix tags. Raises as `HostStage.load`."""
    options = StageOptions(
        kernel=choose_kernel(kernel, num_threads),
        block_size=BLOCK_SIZE,
        num_threads=num_threads,
        require_tags=False,
        kv_dtype=kv_dtype,
    )
    return HostStage.load(source, whole(source)[0], options)


def measure_floor(
    stage: HostStage, options: FloorOptions, read: MemoryRead, say: Callable[[str], None]
) -> tuple[list[FloorRow], list[LinearRow]]:
    """Measure steps of each count, then the linears of every shape. Raises ConvoyError at the deadline."""
    decodes = Decodes(stage, max(options.concurrent), options.max_tokens)
    decodes.read(options.context)
    rows = []
    for count in options.concurrent:
        row = _steps(stage, decodes, count, options.steps, read)
        say(f"{row.kernel}, {count} at once: {row.step_ms:g} ms, {row.of_floor:.0%} of the floor")
        rows.append(row)
    shapes: dict[tuple[int, int], list[PackedLinear]] = {}
    for linear in stage.linears:
        shapes.setdefault((linear.in_features, linear.out_features), []).append(linear)
    kernel = stage.options.kernel
    profile = [
        _linears(kernel, count, stage.least_rows, linears, read)
        for count in options.concurrent
        for linears in shapes.values()
    ]
    return rows, profile


@torch.inference_mode()
def _steps(stage: HostStage, decodes: Decodes, count: int, steps: int, read: MemoryRead) -> FloorRow:
    for _ in range(_WARM_STEPS):
        decodes.step(count)
    seconds, rates = read.beside(lambda: decodes.step(count), steps)
    step_s, rate = statistics.median(seconds), statistics.median(rates)
    return FloorRow(
        kernel=stage.options.kernel,
        concurrent=count,
        context_tokens=decodes.lengths[0],
        step_bytes=stage.step_bytes,
        read_gb_per_s=round(rate / 1e9, 2),
        floor_ms=round(1000 * stage.step_bytes / rate, 3),
        step_ms=round(1000 * step_s, 3),
        tokens_per_s=round(count / step_s, 2),
        of_floor=round(_share(stage.step_bytes, seconds, rates), 3),
    )


@torch.inference_mode()
def _linears(
    kernel: str, count: int, least_rows: int, linears: Sequence[PackedLinear], read: MemoryRead
) -> LinearRow:
    x = torch.randn(padded_count(count, least_rows), linears[0].in_features)

    def run() -> None:
        for linear in linears:
            linear(x)

    run()
    seconds, rates = read.beside(run, 7)
    num_bytes = sum(linear.weight_bytes for linear in linears)
    took_s = statistics.median(seconds)
    return LinearRow(
        *(kernel, count, linears[0].in_features, linears[0].out_features, len(linears)),
        ms=round(1000 * took_s, 3),
        gb_per_s=round(num_bytes / took_s / 1e9, 2),
        of_read=round(_share(num_bytes, seconds, rates), 3),
    )


def _share(num_bytes: int, seconds: Iterable[float], rates: Iterable[float]) -> float:
    return statistics.median(num_bytes / rate / took for took, rate in zip(seconds, rates, strict=True))


def floor_ratios(rows: Sequence[FloorRow]) -> dict[str, float]:
    """Return each kernel's share of the floor, and its step times over that of one decode, if measured."""
    ms = {(row.kernel, row.concurrent): row.step_ms for row in rows}
    ratios = {f"{row.kernel}_of_floor": row.of_floor for row in rows if row.concurrent == 1}
    for kernel in dict.fromkeys(row.kernel for row in rows):
        for count in (4, 16):
            if {(kernel, 1), (kernel, count)} <= ms.keys():
                ratios[f"{kernel}_step_{count}_over_1"] = round(ms[kernel, count] / ms[kernel, 1], 3)
    return ratios
