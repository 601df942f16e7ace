"""Compare decode steps of compiled layers with steps part by part: `python bench/compiled_layers.py`.

Each model has one family's form and drawn weights, and is tiny or has the shape of `llama-250m`. A row of the
result has the processor time of a step, of all threads, and its wall time, both ways in turn. `--out FILE`
writes the rows as JSON too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from convoy.model.backends.host.native_layers import NativeLayers
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import CONFIGS, describe_tensors
from convoy.model.layers.compiled import NativeExperts
from convoy.model.stage import StageOptions
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "250m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "head_dim": 64}
    | {name: CONFIGS["llama-250m"][name] for name in ("num_attention_heads", "num_key_value_heads")},
}
COMMON = {"vocab_size": 512, "max_position_embeddings": 1024, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "num_local_experts": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {"pad_token_id": None},
    "gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 64},
    "gemma3_text": {"sliding_window": 256, "query_pre_attn_scalar": 64},
    # As many products of a token as the dense models have.
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 704},
    "gpt_oss": {**EXPERTS, "intermediate_size": 704, "sliding_window": 128},
}
CONTEXT, BLOCK = 128, 16
# Steps of one way before the other has its turn, and turns.
STEPS, TURNS = 8, 5


def drawn(family: str, shape: str) -> HostStage:
    config = {"model_type": family, **COMMON, **SHAPES[shape], **FAMILIES[family]}
    if shape == "tiny":
        config |= {name: 32 for name in ("moe_intermediate_size",) if name in config}
    spec = ModelSpec.from_config(config, family)
    source = ModelSource(family, Path(), config, spec, family, describe_tensors(config, spec), seed=0)
    whole = StageAssignment("alpha", 0, spec.num_layers, embed=True, output=False)
    return HostStage.load(source, whole, StageOptions("exact-f32", BLOCK, require_tags=False))


@contextmanager
def by_parts() -> Iterator[None]:
    scores, rows = NativeLayers.max_scores, NativeExperts.max_rows
    NativeLayers.max_scores = NativeExperts.max_rows = 0
    try:
        yield
    finally:
        NativeLayers.max_scores, NativeExperts.max_rows = scores, rows


def measured(stage: HostStage, num_rows: int) -> dict[str, float]:
    """Return the median milliseconds of a step, both ways: of processors and of the wall."""
    blocks, steps = -(-(CONTEXT + 1) // BLOCK), itertools.count()
    groups = len(stage.block_bytes)
    stage.make_pools(num_rows * blocks)
    grants = [
        BlockGrant.append(row, group, list(range(row * blocks, (row + 1) * blocks)))
        for row in range(num_rows)
        for group in range(groups)
    ]
    stage.apply(Step(next(steps), [], grants, [Row(row, 0, CONTEXT, 0) for row in range(num_rows)], b""))
    rows = [Row(row, CONTEXT, 1, 1) for row in range(num_rows)]
    tokens = torch.arange(num_rows)
    found: dict[str, list[float]] = {}

    def turn(name: str) -> torch.Tensor:
        for _ in range(STEPS):
            began, busy = time.perf_counter(), time.process_time()
            out = stage.run(Step(next(steps), [], [], rows, b""), None, tokens)
            found.setdefault(f"{name}_cpu_ms", []).append(1e3 * (time.process_time() - busy))
            found.setdefault(f"{name}_wall_ms", []).append(1e3 * (time.perf_counter() - began))
        return out

    for _ in range(TURNS):
        with by_parts():
            expected = turn("parts")
        assert torch.equal(expected, turn("compiled")), "the bits differ"
    return {name: round(median(times), 3) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    results = []
    for family, shape in itertools.product(given.families.split(","), given.shapes.split(",")):
        stage = drawn(family, shape)
        for num_rows in map(int, given.rows.split(",")):
            results.append({"family": family, "shape": shape, "rows": num_rows, **measured(stage, num_rows)})
            sys.stdout.write(json.dumps(results[-1]) + "\n")
            sys.stdout.flush()
    if given.out is not None:
        given.out.write_text(json.dumps({"threads": given.threads, "steps": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
