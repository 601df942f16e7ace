"""Measure one stage on a CUDA device beside its limits: ``python -m comparisons.cuda.single FILE``.

The floor of a decode is the time to read its weights once at the device's own copy bandwidth. The limit of a
prefill is the rate of a large matrix product. Both are measured first, on the same device. The file is
written anew after every part, so that a run that is cut off leaves its results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import triton

from convoy.model.backends.cuda.decoder import DeviceDecoder
from convoy.model.backends.cuda.kernels.single_row import TILES, Tile, lone_linear
from convoy.model.backends.cuda.memory.weights import DeviceLayerWeights, StageWeights
from convoy.model.backends.cuda.options import KERNEL
from convoy.model.backends.cuda.stage import CudaStage
from convoy.model.checkpoints.source import ModelSource
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

BLOCK_SIZE = 16
CONTEXT = 512
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
# Rows, and the tokens of each.
PREFILLS = ((1, 2048), (4, 512), (1, 8192))
_COPY_BYTES = 4 << 30
_MATMUL = 8192
# For answers after the context.
_SPARE_TOKENS = 256


@dataclass
class Findings:
    """Keep the results so far, and the time at which the run must end (`time.monotonic`)."""

    path: Path
    end_s: float
    values: dict[str, object] = field(default_factory=dict)

    def add(self, name: str, value: object) -> None:
        """Keep a result, and write all results so far."""
        self.values[name] = value
        self.path.write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end_s


class Decoding:
    """Decode sequences on one stage that owns the whole model: steps made by hand, without an engine."""

    def __init__(self, stage: CudaStage, num_sequences: int, seed: int) -> None:
        self._stage = stage
        self._drawn = random.Random(seed)  # noqa: S311 - not a secret
        self._number = 0
        self._length = 0
        self.num_sequences = num_sequences
        self._blocks = -(-(CONTEXT + _SPARE_TOKENS) // BLOCK_SIZE)
        stage.make_pools(num_sequences * self._blocks)

    def read(self) -> None:
        """Run every prompt of `CONTEXT` tokens, four to a step."""
        for first in range(0, self.num_sequences, 4):
            chosen = range(first, min(first + 4, self.num_sequences))
            grants = [
                BlockGrant.append(s, 0, [s * self._blocks + b for b in range(self._blocks)]) for s in chosen
            ]
            rows = [Row(s, 0, CONTEXT, 1) for s in chosen]
            self.step(grants, rows, self.tokens(CONTEXT * len(chosen)))
        self._length = CONTEXT

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one token of every sequence.

        Return the likeliest next ones: int64 [num_sequences] on the host.
        """
        rows = [Row(s, self._length, 1, 1) for s in range(self.num_sequences)]
        self._length += 1
        return self.step([], rows, tokens).argmax(-1).cpu()

    def step(self, grants: list[BlockGrant], rows: list[Row], tokens: torch.Tensor) -> torch.Tensor:
        """Run one step and return its logits on the device."""
        step = Step(self._number, [], grants, rows, b"")
        self._number += 1
        hidden = self._stage.run(step, hidden=None, tokens=tokens)
        return self._stage.device_output(self._stage.select(step, hidden))

    def tokens(self, count: int) -> torch.Tensor:
        """Return ``count`` random token ids."""
        vocabulary = self._stage.vocab_size
        return torch.tensor([self._drawn.randrange(vocabulary) for _ in range(count)])


def device_ms(work: Callable[[], object], rounds: int) -> float:
    """Return the milliseconds on the device: the median of ``rounds``, after two that do not count."""
    found: list[float] = []
    for number in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        if number >= 2:
            found.append(begin.elapsed_time(end))
    return statistics.median(found)


def replayed_ms(work: Callable[[], object], rounds: int) -> float:
    """Return `device_ms` of the captured work, so that Python's time does not count."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return device_ms(graph.replay, rounds)


def measure_machine() -> dict[str, object]:
    """Measure the reference rates: memory copy and matrix product."""
    name = torch.cuda.get_device_name()
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_ms = device_ms(partial(target.copy_, source), 10)
    left, right = (torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = device_ms(partial(torch.matmul, left, right), 20)
    return {
        "device": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "copy_gb_per_s": round(2 * _COPY_BYTES / copy_ms / 1e6, 1),
        "matmul_tflop_per_s": round(2 * _MATMUL**3 / product_ms / 1e9, 1),
    }


def measure_lone(layers: Sequence[DeviceLayerWeights], copy_gb_per_s: float) -> list[dict[str, object]]:
    """Measure each linear of a lone row, with each tile and through the library, over all layers in turn."""
    rows: list[dict[str, object]] = []
    for name, gated in (("qkv", False), ("out", False), ("gate_up", True), ("down", False)):
        weights = [getattr(layer, name) for layer in layers]
        x = torch.randn(1, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
        floor_us = weights[0].nbytes / copy_gb_per_s / 1e3
        for tile in (*TILES, None):
            ms = replayed_ms(partial(_each, weights, x, tile, gated=gated), 5)
            us = 1000 * ms / len(weights)
            text = "library" if tile is None else f"{tile.outputs}x{tile.inputs}/{tile.num_warps}"
            rows.append(
                {"linear": name, "tile": text, "us": round(us, 2), "floor_share": round(floor_us / us, 3)}
            )
    return rows


def _each(weights: Sequence[torch.Tensor], x: torch.Tensor, tile: Tile | None, *, gated: bool) -> None:
    for weight in weights:
        if tile is None:
            torch.nn.functional.linear(x, weight)
        else:
            lone_linear(x, weight, norm=x if gated else None, gated=gated, tile=tile)


def measure_decode(stage: CudaStage, batch: int, floor_ms: float, num_steps: int) -> dict[str, object]:
    """Measure steps from token ids to token ids, including the host's work between them."""
    decoding = Decoding(stage, batch, seed=batch)
    decoding.read()
    tokens = decoding.tokens(batch)
    for _ in range(4):
        tokens = decoding.decode(tokens)
    found = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        tokens = decoding.decode(tokens)
        found.append(time.perf_counter() - started_s)
    ms = 1000 * statistics.median(found)
    hidden = torch.randn(batch, stage.hidden_size, device="cuda", dtype=torch.bfloat16)
    output_ms = device_ms(partial(stage.output, hidden), 10)
    return {
        "batch": batch,
        "context_tokens": CONTEXT,
        "step_ms": round(ms, 3),
        "worst_ms": round(1000 * max(found), 3),
        "tokens_per_s": round(1000 * batch / ms, 1),
        "floor_share": round(floor_ms / ms, 3),
        "output_on_host_ms": round(output_ms, 3),
    }


def measure_prefill(stage: CudaStage, num_rows: int, length: int, tflop_per_s: float) -> dict[str, object]:
    """Measure chunks of new sequences, to the first token of each."""
    blocks = -(-length // BLOCK_SIZE)
    decoding = Decoding(stage, 1, seed=length)
    stage.make_pools(num_rows * blocks)
    tokens = decoding.tokens(num_rows * length)
    grants = [BlockGrant.append(s, 0, list(range(s * blocks, (s + 1) * blocks))) for s in range(num_rows)]
    rows = [Row(s, 0, length, 1) for s in range(num_rows)]
    decoding.step(grants, rows, tokens).argmax(-1).cpu()
    found = []
    for _ in range(8):
        started_s = time.perf_counter()
        decoding.step([], rows, tokens).argmax(-1).cpu()
        found.append(time.perf_counter() - started_s)
    seconds = statistics.median(found)
    done = _prefill_flop(stage, num_rows, length) / seconds / 1e12
    return {
        "rows": num_rows,
        "tokens": length,
        "ms": round(1000 * seconds, 2),
        "tokens_per_s": round(num_rows * length / seconds, 1),
        "tflop_per_s": round(done, 1),
        "matmul_share": round(done / tflop_per_s, 3),
    }


def weights_of(stage: CudaStage) -> StageWeights:
    """Return the weights of a model that runs on our own layers."""
    assert isinstance(stage.model, DeviceDecoder)
    return stage.model.weights


def _prefill_flop(stage: CudaStage, num_rows: int, length: int) -> float:
    layers = weights_of(stage).layers.values()
    matrices = sum(t.numel() for layer in layers for t in layer.matrices)
    width = next(iter(layers)).out.shape[1]
    # Attention is causal: half of all pairs, once for the scores and once for the values.
    attention = 2 * length * length * width * len(layers)
    head = weights_of(stage).head
    return num_rows * (2.0 * matrices * length + attention + (0 if head is None else 2 * head.numel()))


def run(model: str, findings: Findings, batches: Sequence[int], kernel: str = KERNEL) -> None:
    """Run all parts, as far as time allows."""
    machine = measure_machine()
    findings.add("machine", machine)
    copy, matmul = float(str(machine["copy_gb_per_s"])), float(str(machine["matmul_tflop_per_s"]))
    source = ModelSource.resolve(model)
    assignment = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    started_s = time.perf_counter()
    stage = CudaStage.load(
        *(source, assignment), device="cuda", kernel=kernel, block_size=BLOCK_SIZE, require_tags=False
    )
    torch.cuda.synchronize()
    embedding = weights_of(stage).embedding
    read_bytes = stage.weight_bytes - (0 if embedding is None else embedding.nbytes)
    floor_ms = read_bytes / copy / 1e6
    findings.add(
        "weights",
        {
            "model": model,
            "kernel": kernel,
            "load_s": round(time.perf_counter() - started_s, 2),
            "bytes": stage.weight_bytes,
            "bytes_read_by_a_step": read_bytes,
            "floor_ms": round(floor_ms, 3),
            "floor_of_all_bytes_ms": round(stage.weight_bytes / copy / 1e6, 3),
        },
    )
    # `comparisons.cuda.forms` measures linears by codes and scales.
    if kernel == KERNEL:
        with torch.inference_mode():
            findings.add("lone_linears", measure_lone(list(weights_of(stage).layers.values()), copy))
    decoded: list[dict[str, object]] = []
    for batch in batches:
        if not findings.over:
            decoded.append(measure_decode(stage, batch, floor_ms, 60))
            findings.add("decode", decoded)
    rows: list[dict[str, object]] = []
    for num_rows, length in PREFILLS:
        if not findings.over:
            rows.append(measure_prefill(stage, num_rows, length, matmul))
            findings.add("prefill", rows)
    findings.add("peak_bytes", torch.cuda.max_memory_allocated())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(prog="comparisons.cuda.single", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="synthetic:llama-3-8b")
    parser.add_argument("--kernel", default=KERNEL)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--max-seconds", type=float, default=240.0)
    chosen = parser.parse_args(arguments)
    batches = [int(batch) for batch in chosen.batches.split(",")]
    run(chosen.model, Findings(chosen.file, time.monotonic() + chosen.max_seconds), batches, chosen.kernel)


if __name__ == "__main__":
    main()
