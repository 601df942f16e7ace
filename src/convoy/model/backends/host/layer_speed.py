"""Measure the time of a step's layers on this host, on two models of one form: a wide one and a narrow one.

Both have Llama's form, with the same heads and drawn weights, and run as a stage runs them. The narrow
one's linears cost next to nothing: its time is Python, the starts of operations, norms and attention. The
wide one's additional time belongs to its linears: reading them for a lone row, multiplying with them for
many rows, and processing each number of their results.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path

import torch

from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import MIN_VOCABULARY, describe_tensors
from convoy.model.stage import StageOptions
from convoy.plan.spec.cache import dtype_bytes
from convoy.plan.spec.families.llama import LLAMA
from convoy.plan.spec.model import ModelSpec
from convoy.plan.speed import FEW_ROWS, MANY_ROWS, Speed
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

# Hidden and intermediate sizes. A wide layer has 45 MB of float32.
_WIDE, _NARROW = (1024, 2816), (64, 64)
# Layers of the narrow model. Its first layer is also measured alone.
_NUM_LAYERS = 3
_LEAST_WIDE, _MOST_WIDE = 2, 4
_WIDE_LAYER_BYTES = 45_000_000
# Weights that are read in turn together exceed the last cache, or a lone row would find them there.
_LEAST_UNCACHED_BYTES, _MOST_UNCACHED_BYTES = 80 << 20, 256 << 20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_HEADS, _KV_HEADS, _HEAD_DIM = 16, 4, 64
# Tokens that decodes look back on. A chunk looks back on 256.
_CONTEXT = 512
_BLOCK = 16  # tokens
# The least share of the longer step: on busy cores it may seem no longer than the shorter one.
_LEAST_SHARE = 0.02
# At least so many rounds and so long, for each kind of step.
_ROUNDS, _MEASURE_S = 3, 0.04
# The limit for all measurements. After it, one round has to do: on busy cores threads wait for each other.
_MOST_S = 3.0


def measure_layers(kernel: str, num_threads: int | None) -> Speed:
    """Return the speed of layers, from the best of some rounds of each kind of step.

    Takes a second or two. Raises SelfCheckError where the kernel does not hold on this machine.
    """
    narrow, wide = _describe(*_NARROW), _describe(*_WIDE)
    one, several = (_Probe(narrow, end, kernel, num_threads) for end in (1, _NUM_LAYERS))
    num_wide = min(_MOST_WIDE, max(_LEAST_WIDE, -(-uncached_bytes() // _WIDE_LAYER_BYTES)))
    broad = _Probe(wide, num_wide, kernel, num_threads)
    # The clock starts only after all models are loaded.
    for probe in (one, several, broad):
        probe.until_s = time.perf_counter() + _MOST_S

    def layer_s(*load: int) -> float:
        return seconds_beyond(several.best_s(*load), one.best_s(*load)) / (_NUM_LAYERS - 1)

    own = {load: layer_s(*load) for load in ((1, 1, 0), (FEW_ROWS, 1, 0), (1, MANY_ROWS, 0))}
    # Wide layers against as many narrow ones: the difference is the cost of the linears.
    linears = {
        load: seconds_beyond(broad.best_s(*load), one.best_s(*load) + (num_wide - 1) * own[load]) / num_wide
        for load in own
    }
    looking_s = seconds_beyond(layer_s(FEW_ROWS, 1, _CONTEXT), own[FEW_ROWS, 1, 0])
    chunk_s = seconds_beyond(layer_s(1, MANY_ROWS, MANY_ROWS), own[1, MANY_ROWS, 0])
    parts = [source.spec.layers[0].each for source in (wide, narrow)]
    num_bytes, elements = parts[0].num_bytes(kernel) - parts[1].num_bytes(kernel), parts[0].elements
    elements -= parts[1].elements
    kv_bytes = FEW_ROWS * _CONTEXT * 2 * _KV_HEADS * _HEAD_DIM * dtype_bytes(kernel)
    attended = 2 * MANY_ROWS * MANY_ROWS * _HEADS * 2 * _HEAD_DIM
    return Speed(
        read_bytes_per_s=num_bytes / linears[1, 1, 0],
        flop_per_s=2 * MANY_ROWS * elements / linears[1, MANY_ROWS, 0],
        few_flop_per_s=2 * FEW_ROWS * elements / linears[FEW_ROWS, 1, 0],
        cache_bytes_per_s=kv_bytes / looking_s,
        attention_flop_per_s=attended / chunk_s,
        layer_s=own[1, 1, 0],
        row_s=seconds_beyond(own[1, MANY_ROWS, 0], own[1, 1, 0]) / (MANY_ROWS - 1),
        step_s=seconds_beyond(one.best_s(1, 1, 0), own[1, 1, 0]),
    )


def uncached_bytes() -> int:
    """Return how many bytes a probe reads in turn: twice the last cache, from 80 to 256 MiB."""
    found = [0]
    for file in _CACHES.glob("index[0-9]/size"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return min(_MOST_UNCACHED_BYTES, max(_LEAST_UNCACHED_BYTES, 2 * max(found)))


def seconds_beyond(longer_s: float, shorter_s: float) -> float:
    """Return by how much ``longer_s`` exceeds ``shorter_s``.

    It is never zero, because rates are divided by it.
    """
    return max(longer_s - shorter_s, _LEAST_SHARE * longer_s)


def _describe(hidden_size: int, between: int) -> ModelSource:
    config = {
        "model_type": LLAMA,
        "hidden_size": hidden_size,
        "intermediate_size": between,
        "num_hidden_layers": max(_NUM_LAYERS, _MOST_WIDE),
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": MIN_VOCABULARY,
        "max_position_embeddings": 2 * _CONTEXT,
        "tie_word_embeddings": True,
    }
    name = f"probe-{hidden_size}"
    spec = ModelSpec.from_config(config, name)
    return ModelSource(name, Path(), config, spec, name, describe_tensors(config, spec), seed=0)


class _Probe:
    """Run the first layers of a model, and time steps of them."""

    def __init__(self, source: ModelSource, num_layers: int, kernel: str, num_threads: int | None) -> None:
        options = StageOptions(kernel, _BLOCK, num_threads=num_threads, require_tags=False)
        assignment = StageAssignment("probe", 0, num_layers, embed=True, output=False)
        self._stage = HostStage.load(source, assignment, options)
        self._numbers, self._sequences = itertools.count(), itertools.count()
        self.until_s = 0.0
        self._best: dict[tuple[int, int, int], float] = {}

    def best_s(self, num_rows: int, num_tokens: int, context: int) -> float:
        """Return the shortest time of a step of ``num_rows`` rows with ``num_tokens`` tokens each.

        Each row's tokens stand behind ``context`` tokens.
        """
        load = num_rows, num_tokens, context
        if load not in self._best:
            self._best[load] = self._measure(*load)
        return self._best[load]

    def _measure(self, num_rows: int, num_tokens: int, context: int) -> float:
        blocks = -(-(context + num_tokens) // _BLOCK)
        self._stage.make_pools(num_rows * blocks)
        sequences = [next(self._sequences) for _ in range(num_rows)]
        grants = [
            BlockGrant.append(sequence, 0, list(range(index * blocks, (index + 1) * blocks)))
            for index, sequence in enumerate(sequences)
        ]
        known = [Row(sequence, 0, context, 0) for sequence in sequences] if context else []
        # The context's K/V stays zeros, which cost the same time as real numbers.
        self._stage.apply(Step(next(self._numbers), [], grants, known, b""))
        tokens = torch.zeros(num_rows * num_tokens, dtype=torch.int64)
        rows = [Row(sequence, context, num_tokens, 1) for sequence in sequences]
        # One untimed step wakes threads and caches.
        self._stage.run(Step(next(self._numbers), [], [], rows, b""), None, tokens)
        best, count, enough_s = float("inf"), 0, time.perf_counter() + _MEASURE_S
        while not count or (
            time.perf_counter() < self.until_s and (count < _ROUNDS or time.perf_counter() < enough_s)
        ):
            step = Step(next(self._numbers), [], [], rows, b"")
            began_s = time.perf_counter()
            self._stage.run(step, None, tokens)
            best, count = min(best, time.perf_counter() - began_s), count + 1
        return best
