"""One whole model's steps under exact-f32 and w8a8, in turn, in one process: what --quantize int8 gives.

    PYTHONPATH=src python bench/w8a8_steps.py --threads 1,2 --rows 1,4,16 > result.json

A step decodes one token of each of so many sequences of CONTEXT tokens, output included. Kernels take turns
at every repetition, so that what else runs on the machine meets both alike. ``cpu_ms`` is the processor time
of all threads: it tells a step that waited for others from one that computed. Only a quiet machine counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time

import torch

from convoy.config.kernels import EXACT, W8A8
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

CONTEXT = 64
BLOCK = 16


def make_stage(source: ModelSource, kernel: str, most_rows: int) -> HostStage:
    assignment = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    stage = HostStage.load(source, assignment, StageOptions(kernel=kernel, require_tags=False))
    blocks = CONTEXT // BLOCK + 1
    stage.make_pools(most_rows * blocks)
    grants = [BlockGrant(s, 0, list(range(s * blocks, (s + 1) * blocks))) for s in range(most_rows)]
    rows = [Row(s, 0, CONTEXT, 1) for s in range(most_rows)]
    stage.run(Step(0, [], grants, rows, b""), None, torch.arange(most_rows * CONTEXT) % 1000)
    return stage


def step(stage: HostStage, rows: int) -> tuple[float, float]:
    asked = Step(1, [], [], [Row(s, CONTEXT, 1, 1) for s in range(rows)], b"")
    wall, cpu = time.perf_counter(), time.process_time()
    stage.output(stage.run(asked, None, torch.arange(rows)))
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="synthetic:llama-250m")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    counts = [int(n) for n in asked.rows.split(",")]
    torch.set_num_threads(1)
    source = ModelSource.resolve(asked.model)
    stages = {kernel: make_stage(source, kernel, max(counts)) for kernel in (EXACT, W8A8)}
    found = []
    for threads in map(int, asked.threads.split(",")):
        torch.set_num_threads(threads)
        for rows in counts:
            times: dict[str, list[tuple[float, float]]] = {kernel: [] for kernel in stages}
            for _ in range(asked.repeats + 2):
                for kernel, stage in stages.items():
                    times[kernel].append(step(stage, rows))
            for kernel, pairs in times.items():
                walls, cpus = zip(*pairs[2:], strict=True)
                best = min(walls)
                row = {"kernel": kernel, "threads": threads, "rows": rows, "ms": round(best, 2)}
                row |= {"median_ms": round(statistics.median(walls), 2), "cpu_ms": round(min(cpus), 2)}
                found.append(row | {"tokens_per_s": round(1e3 * rows / best, 1)})
                sys.stderr.write(f"{found[-1]}\n")
    machine = {"cpu": platform.processor(), "num_cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    weights = {kernel: stage.weight_bytes for kernel, stage in stages.items()}
    said = {"bench": "w8a8-steps", "machine": machine, "torch": torch.__version__, "model": asked.model}
    said |= {"context": CONTEXT, "weight_bytes": weights, "rows": found}
    sys.stdout.write(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
