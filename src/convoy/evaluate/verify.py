"""Make a parity certificate: check that every allowed cut of a model gives the whole model's results.

The reference is the unsplit stage, and the library's whole model too. Memory holds one copy of the model at a
time. The unsplit stage runs first, then the library's model, then one layout after another. Each layout takes
over the layers of the one before it. Between them only the logits of all positions are kept, twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain as joined
from typing import get_args

import torch

from convoy.config.kernels import (
    AUTO,
    EXACT_KERNELS,
    KERNELS,
    MLX_F32,
    PLAIN,
    ErrorBounds,
    QuantizeFormat,
    kv_form,
    loaded_bits,
)
from convoy.engine.ranks.host_ranks import JOIN
from convoy.engine.ranks.load import load_member_stage
from convoy.errors import ConvoyError
from convoy.evaluate.certificate import Certificate, LayoutResult, limits_of
from convoy.evaluate.chain import StageChain, StageLoader
from convoy.evaluate.compare import Comparison, Expected
from convoy.evaluate.cuts import Layout, layout_text, layouts, whole
from convoy.evaluate.library_model import library_logits, library_version
from convoy.evaluate.prompts import unreached_windows
from convoy.evaluate.runs import Prompts, Run, alone, batched, chunked
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import HOST
from convoy.model.kernels.native.library import native_library
from convoy.model.quantize.load import LoadRounding
from convoy.model.quantize.record import ErrorSums, QuantizeRecord, read_record
from convoy.model.stage import LoadedStage, StageOptions
from convoy.plan.memory.free import free_bytes

# Below, at and above the size of a block.
CHUNKS = (7, 16, 50)
# The share of free memory that the library's model in float64 may take.
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True)
class VerifyOptions:
    """Hold the options of a check.

    With ``max_cuts`` None every cut into two is checked. ``num_tokens`` are decoded for each prompt.
    """

    kernel: str
    max_cuts: int | None = None
    num_tokens: int = 6
    chunks: tuple[int, ...] = CHUNKS
    num_threads: int | None = None
    # Decodes on a device are not captured here, because layers are counted as they are called.
    device: str = "cpu"
    # Ranks of each stage, the unsplit one too.
    ranks: int = 1
    kv_dtype: str = AUTO


# Called with (number done, number in all, next piece of work).
Progress = Callable[[int, int, str], None]


def verify(
    source: ModelSource,
    prompts: Prompts,
    options: VerifyOptions,
    progress: Progress = lambda *_: None,
    load: StageLoader = load_member_stage,
) -> Certificate:
    """Check the whole model and the cuts of ``source``. The certificate lists failures; none of them ends the
    check.

    ``prompts`` are token ids, none empty. Raises ModelError if we or the library cannot load the whole model,
    or its record of rounded weights. Raises SelfCheckError if the kernel does not hold on this machine.
    """
    started = time.monotonic()
    rounded, errors, library = read_record(source.path), ErrorSums(), native_library()
    bits = loaded_bits(options.kernel)
    bench = _Bench(source, prompts, options, load)
    every = [whole(source.spec), *layouts(source.spec, options.max_cuts)]
    progress(0, len(every), "the unsplit stage")
    expected = bench.expect(every[0])
    progress(0, len(every), library_version())
    rounding = LoadRounding(source, bits, errors) if bits else None
    expected.add_library(library_logits(source, expected.texts, rounding=rounding))
    if bits:
        rounded = _record_of(source, options.kernel, errors)
    _ask_float64(source, options, expected)
    found = Certificate(
        model=source.name,
        digest=source.digest,
        kernel=options.kernel,
        kv_dtype=kv_form(options.kernel, options.kv_dtype).name,
        ranks=options.ranks,
        bits=expected.bits,
        compiled_for=library.description if library is not None and options.device == HOST else "",
        rounded=rounded,
        library=library_version(),
        limits=_limits_of(source, options),
        num_layers=source.spec.num_layers,
        prompt_tokens=tuple(len(prompt) for prompt in prompts),
        decoded_tokens=options.num_tokens,
        chunks=options.chunks,
        forbidden_cuts=dict(sorted(source.spec.forbidden_cuts.items())),
        unreached_windows=unreached_windows(source.spec, prompts),
        doubted=expected.own_errors(),
    )
    for index, layout in enumerate(every):
        progress(index, len(every), layout_text(source.spec, layout))
        found.results.append(bench.check(layout, expected))
    progress(len(every), len(every), "")
    found.duration_s = time.monotonic() - started
    return found


class _Bench:
    """Load stages for one layout after another, with at most one copy of each layer in memory."""

    def __init__(
        self, source: ModelSource, prompts: Prompts, options: VerifyOptions, load: StageLoader
    ) -> None:
        self._source = source
        self._prompts = [list(prompt) for prompt in prompts]
        self._options = options
        self._stage_options = StageOptions(
            kernel=options.kernel,
            device=JOIN.join([options.device] * options.ranks),
            captured=False,
            num_threads=options.num_threads,
            require_tags=False,
            kv_dtype=options.kv_dtype,
        )
        self._load = load
        self._stages: list[LoadedStage] = []

    def expect(self, layout: Layout) -> Expected:
        """Return the unsplit stage's results for each prompt by itself. Nothing stays loaded."""
        expected = Expected(self._prompts)
        for run in alone(self._join(layout), self._prompts, self._options.num_tokens):
            expected.add(run)
        self._stages.clear()
        return expected

    def check(self, layout: Layout, expected: Expected) -> LayoutResult:
        """Run a layout in every way. An error of its stages is a failure like any other."""
        started = time.monotonic()
        spec = self._source.spec
        comparison = Comparison(expected, _limits_of(self._source, self._options))
        chain: StageChain | None = None
        failures: list[str] = []
        try:
            chain = self._join(layout)
            for run in self._runs(chain, expected):
                comparison.add(run)
        except ConvoyError as error:
            failures.append(error.message)
            self._stages.clear()
        wrong = {} if chain is None else chain.wrong_layers
        failures += [
            f"layer {layer} ran {count} times in a step, expected once" for layer, count in wrong.items()
        ]
        return LayoutResult(
            spans="whole" if len(layout) == 1 else layout_text(spec, layout),
            num_stages=len(layout),
            from_unsplit=comparison.from_unsplit,
            library=comparison.library_distance(),
            from_float64=comparison.from_float64,
            layers_once=0 if chain is None else spec.num_layers - len(wrong),
            tokens_equal=comparison.tokens_equal,
            near_ties=comparison.num_near_ties,
            failures=failures + comparison.failures(library_version()),
            duration_s=time.monotonic() - started,
        )

    def _runs(self, chain: StageChain, expected: Expected) -> Iterator[Run]:
        options, texts, told = self._options, expected.texts, expected.tokens
        return joined(
            alone(chain, self._prompts, options.num_tokens, told),
            *(chunked(chain, texts, chunk) for chunk in options.chunks),
            batched(chain, self._prompts, options.num_tokens, told),
        )

    def _join(self, layout: Layout) -> StageChain:
        """Load the layers that the present stages lack.

        Stages that only give layers away go first, to free memory.
        """
        old, self._stages = dict(enumerate(self._stages[: len(layout)])), []
        ready: dict[int, LoadedStage] = {}
        for index in sorted(range(len(layout)), key=lambda index: _num_new(layout, old, index)):
            ready[index] = self._load(
                self._source, layout[index], self._stage_options, before=old.pop(index, None)
            )
        self._stages = [ready[index] for index in range(len(layout))]
        lengths = [len(prompt) + self._options.num_tokens for prompt in self._prompts]
        return StageChain(self._source.spec, self._stages, lengths)


def _num_new(layout: Layout, old: dict[int, LoadedStage], index: int) -> int:
    wanted = layout[index]
    if index not in old:
        return wanted.end - wanted.start
    held = old[index].assignment
    return len(set(range(wanted.start, wanted.end)) - set(range(held.start, held.end)))


def _ask_float64(source: ModelSource, options: VerifyOptions, expected: Expected) -> None:
    """Run doubtful prompts through the library in float64, if that fits into memory.

    On these the library's float32 may be wrong. Only for the kernels of float32, with K/V of float32.
    """
    if (
        options.kernel not in {*EXACT_KERNELS, PLAIN, MLX_F32}
        or kv_form(options.kernel, options.kv_dtype).name != "f32"
    ):
        return
    doubtful = expected.doubtful(_limits_of(source, options))
    shapes = source.layout.shapes(source.tensors).values()
    needed = sum(map(math.prod, shapes)) * torch.float64.itemsize
    if doubtful and needed < free_bytes() * _SHARE_OF_MEMORY:
        texts = [expected.texts[index] for index in doubtful]
        bits = loaded_bits(options.kernel)
        rounding = LoadRounding(source, bits) if bits else None
        logits = library_logits(source, texts, dtype=torch.float64, rounding=rounding)
        expected.float64 = dict(zip(doubtful, logits, strict=True))


def _record_of(source: ModelSource, kernel: str, errors: ErrorSums) -> QuantizeRecord:
    """Return the record of weights that a kernel rounds at load, with their bytes as stored and in memory."""
    spec = source.spec
    held = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=kernel)
    stored = sum(tensor.num_bytes for tensor in source.tensors.values())
    form = next(word for word in get_args(QuantizeFormat) if KERNELS[kernel].quantize == word)
    return errors.record((source.name, source.digest), form, (stored, held))


def _limits_of(source: ModelSource, options: VerifyOptions) -> ErrorBounds:
    # Stacks of mlx-lm and of GGUF have other names in the file than in the library.
    has_experts = any(".experts." in name for name in (*source.tensors, *source.layout.made))
    ranks, kv_dtype = options.ranks, options.kv_dtype
    return limits_of(options.kernel, has_experts=has_experts, ranks=ranks, kv_dtype=kv_dtype)
