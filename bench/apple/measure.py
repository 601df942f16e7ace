"""Measure a model on MLX: its certificate, mlx-lm's own loop, one stage of Convoy, and a cluster that runs.

    python bench/apple/measure.py MODEL --out report.json [--url http://127.0.0.1:8000/v1]

MODEL is a directory. The report holds no text and no name of a user or machine. RUN.md has the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import convoy
from convoy.config.kernels import MLX_BF16
from convoy.model.backends.registry import load_stage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import LoadedStage, StageOptions
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

PROMPT_TOKENS, DECODES, ROUNDS = 256, 32, 3
BATCHES = (1, 8)
_BLOCK = 16
_BLOCKS_EACH = -(-(PROMPT_TOKENS + DECODES) // _BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a model on MLX, and write a report.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", help="a cluster that serves the model, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--no-certificate", action="store_true")
    args = parser.parse_args()
    source = ModelSource.resolve(str(args.model))
    report: dict[str, Any] = {
        "machine": describe(),
        "model": {"family": source.spec.family, "layers": source.spec.num_layers, "digest": source.digest},
        "prompt_tokens": PROMPT_TOKENS,
        "decodes": DECODES,
        "rounds": ROUNDS,
    }
    if not args.no_certificate:
        found = convoy.verify(str(args.model), device="mlx", max_cuts=3, prompts=2, num_tokens=4)
        report["certificate"] = {"passed": found.passed, "kernel": found.kernel}
    report["mlx_lm"] = rates(make_mlx_lm_round(args.model, source))
    assignment = StageAssignment("here", 0, source.spec.num_layers, embed=True, output=True)
    stage = load_stage(
        source, assignment, StageOptions(kernel=MLX_BF16, device="mlx", block_size=_BLOCK, require_tags=False)
    )
    for batch in BATCHES:
        report[f"one stage, {batch} at once"] = rates(partial(run_stage, stage, batch))
    stage.give_up()
    alone = report["mlx_lm"]["decode_tokens_per_s"]
    report["one stage over mlx-lm"] = report["one stage, 1 at once"]["decode_tokens_per_s"] / alone
    if args.url:
        report["cluster"] = {str(batch): ask(args.url, batch) for batch in BATCHES}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def describe() -> dict[str, Any]:
    """Return the kind of machine, without its name."""
    kinds = {"system": platform.system(), "release": platform.mac_ver()[0] or platform.release()}
    packages = {name: version(name) for name in ("mlx", "mlx-lm", "torch")}
    return {**kinds, "machine": platform.machine(), "mlx": mx.device_info(), "packages": packages}


def rates(run: Callable[[], tuple[float, float, int]]) -> dict[str, float]:
    """Return the middle of some rounds behind one that is not counted, and the spread of decodes."""
    run()
    rounds = [run() for _ in range(ROUNDS)]
    decodes = [batch * DECODES / decode_s for _, decode_s, batch in rounds]
    return {
        "prefill_tokens_per_s": statistics.median(b * PROMPT_TOKENS / s for s, _, b in rounds),
        "decode_tokens_per_s": statistics.median(decodes),
        "decode_least": min(decodes),
        "decode_most": max(decodes),
    }


def prompt_of(source_size: int, number: int) -> list[int]:
    return [(7 * place + 13 * number) % (source_size - 8) + 4 for place in range(PROMPT_TOKENS)]


def make_mlx_lm_round(path: Path, source: ModelSource) -> Callable[[], tuple[float, float, int]]:
    """Return a round of mlx-lm's own model: a prefill, then greedy decodes, each waiting for its token."""
    model, _ = load_model(path)
    model.set_dtype(mx.bfloat16)
    prompt = mx.array([prompt_of(source.spec.vocab_size, 0)])

    def run() -> tuple[float, float, int]:
        cache = make_prompt_cache(model)
        began_s = time.perf_counter()
        token = mx.argmax(model(prompt, cache=cache)[:, -1], axis=-1)
        mx.eval(token)
        prefilled_s = time.perf_counter()
        for _ in range(DECODES):
            token = mx.argmax(model(token[:, None], cache=cache)[:, -1], axis=-1)
            mx.eval(token)
        return prefilled_s - began_s, time.perf_counter() - prefilled_s, 1

    return run


def run_stage(stage: LoadedStage, batch: int) -> tuple[float, float, int]:
    """Run a round of one stage as a head would: prefills one after another, then decodes together."""
    stage.make_pools(batch * _BLOCKS_EACH)
    last = []
    began_s = time.perf_counter()
    for number in range(batch):
        blocks = list(range(number * _BLOCKS_EACH, (number + 1) * _BLOCKS_EACH))
        ids = prompt_of(stage.vocab_size, number)
        grants = [BlockGrant.append(number, 0, blocks)]
        step = Step(number, [], grants, [Row(number, 0, len(ids), 1)], b"")
        last += _next(stage, step, ids)
    prefilled_s = time.perf_counter()
    for place in range(DECODES):
        rows = [Row(number, PROMPT_TOKENS + place, 1, 1) for number in range(batch)]
        last = _next(stage, Step(batch + place, [], [], rows, b""), last)
    return prefilled_s - began_s, time.perf_counter() - prefilled_s, batch


def _next(stage: LoadedStage, step: Step, ids: Sequence[int]) -> list[int]:
    hidden = stage.run(step, None, torch.tensor(ids, dtype=torch.int64))
    found: list[int] = stage.output(stage.select(step, hidden)).argmax(-1).tolist()
    return found


def ask(url: str, batch: int) -> dict[str, float]:
    """Return the tokens per second of ``batch`` requests at once over HTTP, all of them together."""
    body = {"prompt": "Count from one to a thousand: one, two, three,", "max_tokens": 128, "ignore_eos": True}

    def one(_number: int) -> int:
        request = urllib.request.Request(  # noqa: S310
            f"{url}/completions",
            json.dumps({"model": "default", **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
            return int(json.load(answer)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(batch) as pool:
        list(pool.map(one, range(batch)))
        began_s = time.perf_counter()
        total = math.fsum(pool.map(one, range(batch)))
    return {"tokens_per_s": total / (time.perf_counter() - began_s)}


if __name__ == "__main__":
    main()
