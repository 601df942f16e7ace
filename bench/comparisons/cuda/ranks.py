"""Compare two CUDA devices that share every layer with one: ``python -m comparisons.cuda.ranks FILE``.

Steps are made by hand, from token ids on the host to the likeliest next ones on the host: on one device, and
on two as ranks of one member. Sums by size are captured, so that Python's time does not count. The file is
written anew after every part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from comparisons.cuda.single import BLOCK_SIZE, CONTEXT, Findings, measure_machine
from convoy.engine.ranks.load import load_member_stage
from convoy.model.backends.cuda.kernels.sums import DeviceRanks, DeviceSums
from convoy.model.backends.cuda.options import KERNEL
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import CONFIGS
from convoy.model.sampling.output_rows import GREEDY
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

ONE, BOTH = "cuda:0", "cuda:0+cuda:1"
BATCHES = (1, 8, 64)
# KiB of bfloat16.
SIZES = (8, 32, 128, 512, 2048)
# Prompts read in a step.
_ROWS = 4
_STEPS, _WARM_STEPS = 64, 8
# Sums in a captured run.
_SUMS = 100
# Layers of a Llama with 70 billion parameters: as many as fit on one device beside its vocabulary.
_LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 16}


def decode_ms(stage: Any, batch: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each decode step after `CONTEXT` tokens, and of each prompt step but the
    first.
    """
    blocks = -(-(CONTEXT + _STEPS + _WARM_STEPS) // BLOCK_SIZE)
    stage.make_pools(batch * blocks)
    generator = torch.Generator().manual_seed(batch)
    number = 0

    def run(grants: list[BlockGrant], rows: list[Row], tokens: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        hidden = stage.start(Step(number, [], grants, rows, b""), None, tokens, selects=True).wait()
        outcomes = stage.sample(hidden, [GREEDY] * len(rows)).outcomes()
        return torch.tensor([outcome.sampled.token_id for outcome in outcomes])

    read = []
    for first in range(0, batch, _ROWS):
        chosen = range(first, min(first + _ROWS, batch))
        grants = [BlockGrant.append(s, 0, [s * blocks + b for b in range(blocks)]) for s in chosen]
        rows = [Row(s, 0, CONTEXT, 1) for s in chosen]
        ids = torch.randint(0, stage.vocab_size, (CONTEXT * len(chosen),), generator=generator)
        started_s = time.perf_counter()
        run(grants, rows, ids)
        read.append(1000 * (time.perf_counter() - started_s))
    tokens = torch.randint(0, stage.vocab_size, (batch,), generator=generator)
    found = []
    for length in range(CONTEXT, CONTEXT + _STEPS + _WARM_STEPS):
        rows = [Row(s, length, 1, 1) for s in range(batch)]
        started_s = time.perf_counter()
        tokens = run([], rows, tokens)
        found.append(1000 * (time.perf_counter() - started_s))
    return found[_WARM_STEPS:], read[1:]


@contextmanager
def loaded(source: ModelSource, device: str) -> Iterator[Any]:
    """Load the whole model as one stage on ``device``, and free it at the end of the block."""
    whole = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    options = StageOptions(kernel=KERNEL, block_size=BLOCK_SIZE, device=device, require_tags=False)
    stage = load_member_stage(source, whole, options)
    try:
        yield stage
    finally:
        stage.give_up()


def measure_model(model: str, name: str) -> list[dict[str, object]]:
    """Measure each batch on one device, then on both."""
    source = ModelSource.resolve(model)
    rows: list[dict[str, object]] = []
    for device in (ONE, BOTH):
        with loaded(source, device) as stage:
            for batch in BATCHES:
                found, read = decode_ms(stage, batch)
                ms = statistics.median(found)
                row = {"model": name, "device": device, "batch": batch, "context_tokens": CONTEXT}
                row |= {"step_ms": round(ms, 3), "worst_ms": round(max(found), 3)}
                row |= {
                    "tokens_per_s": round(1000 * batch / ms, 1),
                    "weight_share": round(stage.weight_share, 3),
                }
                alone = next((r for r in rows if r["batch"] == batch), None)
                if alone is not None:
                    row["over_one_device"] = round(float(str(alone["step_ms"])) / ms, 3)
                if len(read) > 1:
                    row[f"prefill_ms_of_{_ROWS * CONTEXT}_tokens"] = round(statistics.median(read), 2)
                rows.append(row)
        torch.cuda.empty_cache()
    return rows


def measure_sums() -> list[dict[str, object]]:
    """Return the microseconds of a sum of two ranks, by size, one sum after the other in a captured run."""
    devices = [torch.device(name) for name in BOTH.split("+")]
    group = DeviceRanks(devices)
    found: list[dict[str, object]] = []

    def work(end: DeviceSums, device: torch.device) -> None:
        with torch.inference_mode(), torch.cuda.device(device):
            for size in SIZES:
                us = _captured_us(end, torch.randn(size * 512, device=device).bfloat16())
                if end.rank == 0:
                    found.append({"through": "device memory", "bytes": size * 1024, "us": round(us, 2)})

    threads = [threading.Thread(target=work, args=pair) for pair in zip(group.ends, devices, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _captured_us(end: DeviceSums, x: torch.Tensor) -> float:
    out = torch.zeros_like(x)
    stream = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        end.add(x, out)
        end.finish()
    torch.cuda.synchronize(x.device)
    graph = torch.cuda.CUDAGraph()
    with end.captures(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_SUMS):
            end.add(x, out)
        end.finish()
    times = []
    for _ in range(20):
        end.meet()
        started_s = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(x.device)
        times.append(1e6 * (time.perf_counter() - started_s) / _SUMS)
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(prog="comparisons.cuda.ranks", description=__doc__)
    parser.add_argument("file", type=Path)
    chosen = parser.parse_args(arguments)
    # The same interval as in the `convoy` command.
    sys.setswitchinterval(0.001)
    findings = Findings(chosen.file, time.monotonic())
    findings.add("machine", measure_machine())
    torch.cuda.empty_cache()
    findings.add("sums", measure_sums())
    findings.add("llama-3-8b", measure_model("synthetic:llama-3-8b", "synthetic:llama-3-8b"))
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "llama-70b-16-layers.json"
        config.write_text(json.dumps({**CONFIGS["llama-3-8b"], **_LARGE}), encoding="utf-8")
        findings.add("70b-layers", measure_model(f"synthetic:{config}", "16 layers of a Llama 70B"))


if __name__ == "__main__":
    main()
