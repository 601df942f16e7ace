"""Measure a model on MLX: its certificate, mlx-lm's own loop, one stage of Convoy, and a cluster that runs.

    python bench/apple/measure.py MODEL --out report.json [--url http://127.0.0.1:8000/v1]

MODEL is a directory, or the name of a synthetic model, which is drawn in 4 bits. The report holds no text and
no name of a user or machine. RUN.md has the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
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
from convoy.config.kernels import MLX_BF16, MLX_F32
from convoy.model.backends.registry import load_stage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import Synthetic
from convoy.model.stage import LoadedStage, StageOptions
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

BATCHES = (1, 8)
_BLOCK = 16
_GROUP, _BITS = 64, 4
# By --dtype: the kernel of our stage, and the dtype of mlx-lm's model.
_KINDS = {"bfloat16": (MLX_BF16, mx.bfloat16), "float32": (MLX_F32, mx.float32)}
# What a round returns: seconds of the prefill and of the decodes, and the number of sequences.
Round = Callable[[], tuple[float, float, int]]


class Lengths(argparse.Namespace):
    """Hold the sizes of a round, and the number of rounds that count."""

    prompt_tokens: int
    decodes: int
    rounds: int
    dtype: str

    @property
    def blocks_each(self) -> int:
        return -(-(self.prompt_tokens + self.decodes) // _BLOCK)


def main() -> None:
    # A processor needs seconds for what a GPU does in one of its thousandths.
    has_gpu = mx.metal.is_available()
    parser = argparse.ArgumentParser(description="Measure a model on MLX, and write a report.")
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", help="a cluster that serves the model, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--no-certificate", action="store_true")
    parser.add_argument("--prompt-tokens", type=int, default=256 if has_gpu else 16)
    parser.add_argument("--decodes", type=int, default=32 if has_gpu else 8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=_KINDS, default="bfloat16")
    args = parser.parse_args(namespace=Lengths())
    with tempfile.TemporaryDirectory() as folder:
        synthetic = Synthetic.parse(args.model)
        path = Path(args.model) if synthetic is None else draw(synthetic, Path(folder))
        for report in measure(path, args):
            # As it comes: a later part may not end.
            args.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(path: Path, args: Any) -> Iterator[dict[str, Any]]:
    """Yield the report each time that it has grown."""
    source = ModelSource.resolve(str(path))
    report: dict[str, Any] = {
        "machine": describe(),
        "model": {"family": source.spec.family, "layers": source.spec.num_layers, "digest": source.digest},
        "prompt_tokens": args.prompt_tokens,
        "decodes": args.decodes,
        "rounds": args.rounds,
        "dtype": args.dtype,
    }
    if not args.no_certificate:
        found = convoy.verify(str(path), device="mlx", max_cuts=3, prompts=2, num_tokens=4)
        report["certificate"] = {"passed": found.passed, "kernel": found.kernel}
        yield report
    assignment = StageAssignment("here", 0, source.spec.num_layers, embed=True, output=True)
    stage = load_stage(
        *(source, assignment),
        StageOptions(kernel=_KINDS[args.dtype][0], device="mlx", block_size=_BLOCK, require_tags=False),
    )
    # In turn, so that both meet the same load of the machine.
    one, theirs = partial(run_stage, stage, 1, args), make_mlx_lm_round(path, source, args)
    pairs = list(in_turn((one, theirs), args.rounds))
    ours_s, theirs_s = ([pair[place] for pair in pairs] for place in range(2))
    report["mlx_lm"] = rates(theirs_s, args)
    report["one stage, 1 at once"] = rates(ours_s, args)
    for name, part in (("prefill", 0), ("decode", 1)):
        report[f"one stage over mlx-lm, {name}"] = statistics.median(
            other[part] / own[part] for own, other in pairs
        )
    yield report
    for batch in BATCHES[1:]:
        rounds = [found[0] for found in in_turn((partial(run_stage, stage, batch, args),), args.rounds)]
        report[f"one stage, {batch} at once"] = rates(rounds, args)
    stage.give_up()
    if args.url:
        report["cluster"] = {str(batch): ask(args.url, batch) for batch in BATCHES}
    yield report


def describe() -> dict[str, Any]:
    """Return the kind of machine, without its name."""
    kinds = {"system": platform.system(), "release": platform.mac_ver()[0] or platform.release()}
    packages = {name: version(name) for name in ("mlx", "mlx-lm", "torch")}
    return {**kinds, "machine": platform.machine(), "mlx": mx.device_info(), "packages": packages}


def draw(synthetic: Synthetic, folder: Path) -> Path:
    """Write random weights of a synthetic model's shape in MLX's 4 bits, as `mlx_lm.convert` would."""
    config = synthetic.config()
    source = ModelSource.resolve(synthetic.name)
    mx.random.seed(synthetic.seed)
    arrays: dict[str, mx.array] = {}
    for name, tensor in source.tensors.items():
        if len(tensor.shape) == 1:
            arrays[name] = mx.ones(tensor.shape, mx.bfloat16)
            continue
        values = mx.random.normal(tensor.shape, mx.bfloat16, scale=tensor.shape[-1] ** -0.5)
        module = name.removesuffix(".weight")
        parts = mx.quantize(values, group_size=_GROUP, bits=_BITS)
        for role, part in zip(("weight", "scales", "biases"), parts, strict=True):
            arrays[f"{module}.{role}"] = part
        mx.eval(*parts)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    written = {**config, "quantization": {"group_size": _GROUP, "bits": _BITS}, "dtype": "bfloat16"}
    # mlx-lm reads rotations under their older name.
    rope = config["rope_parameters"]
    assert isinstance(rope, dict), "a row of the synthetic models"
    (folder / "config.json").write_text(json.dumps({**written, "rope_theta": rope["rope_theta"]}))
    return folder


def in_turn(runs: Sequence[Round], rounds: int) -> Iterator[list[tuple[float, float, int]]]:
    """Yield the rounds of all ``runs``, behind one of each that is not counted."""
    for run in runs:
        run()
    for _ in range(rounds):
        yield [run() for run in runs]


def rates(rounds: Sequence[tuple[float, float, int]], args: Any) -> dict[str, float]:
    """Return the middle of some rounds, and the spread of decodes."""
    decodes = [batch * args.decodes / decode_s for _, decode_s, batch in rounds]
    return {
        "prefill_tokens_per_s": statistics.median(b * args.prompt_tokens / s for s, _, b in rounds),
        "decode_tokens_per_s": statistics.median(decodes),
        "decode_least": min(decodes),
        "decode_most": max(decodes),
    }


def prompt_of(source_size: int, number: int, num_tokens: int) -> list[int]:
    return [(7 * place + 13 * number) % (source_size - 8) + 4 for place in range(num_tokens)]


def make_mlx_lm_round(path: Path, source: ModelSource, args: Any) -> Round:
    """Return a round of mlx-lm's own model: a prefill, then greedy decodes, each started before it is read.

    That is how its `generate_step` overlaps the host with the device.
    """
    model, _ = load_model(path)
    model.set_dtype(_KINDS[args.dtype][1])
    prompt = mx.array([prompt_of(source.spec.vocab_size, 0, args.prompt_tokens)])

    def run() -> tuple[float, float, int]:
        cache = make_prompt_cache(model)
        began_s = time.perf_counter()
        token = mx.argmax(model(prompt, cache=cache)[:, -1], axis=-1)
        mx.eval(token)
        prefilled_s = time.perf_counter()
        for _ in range(args.decodes):
            following = mx.argmax(model(token[:, None], cache=cache)[:, -1], axis=-1)
            mx.async_eval(following)
            token.item()
            token = following
        mx.eval(token)
        return prefilled_s - began_s, time.perf_counter() - prefilled_s, 1

    return run


def run_stage(stage: LoadedStage, batch: int, args: Any) -> tuple[float, float, int]:
    """Run a round of one stage as a head would: prefills one after another, then decodes together."""
    stage.make_pools(batch * args.blocks_each)
    last = []
    began_s = time.perf_counter()
    for number in range(batch):
        blocks = list(range(number * args.blocks_each, (number + 1) * args.blocks_each))
        ids = prompt_of(stage.vocab_size, number, args.prompt_tokens)
        grants = [BlockGrant.append(number, 0, blocks)]
        step = Step(number, [], grants, [Row(number, 0, len(ids), 1)], b"")
        last += _next(stage, step, ids)
    prefilled_s = time.perf_counter()
    for place in range(args.decodes):
        rows = [Row(number, args.prompt_tokens + place, 1, 1) for number in range(batch)]
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
