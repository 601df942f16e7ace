"""Measure the parts of a float32 prefill by processor time: `python bench/prefill_parts.py [--json FILE]`.

Prompts run through some layers of `synthetic:llama-250m`, with compiled attention and activations and with
torch's operators in turn. A part's time has none of the parts inside it. The share of the first thread tells
how evenly two threads work: with 0.50 neither waits for the other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from convoy.model.backends.host import stage_kv
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import Synthetic, describe_tensors
from convoy.model.kernels import activation, linear
from convoy.model.layers import exact
from convoy.model.stage import StageOptions
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

MODEL = "synthetic:llama-250m"
LAYERS = 4
PROMPT, CHUNK, BLOCK = 1024, 512, 16
ROUNDS = 5
# Each part's function: its owner and its name. Attention has rotation, K/V and copies, "others" residuals.
PARTS: dict[str, tuple[Any, str]] = {
    "linears": (linear.PackedLinear, "forward"),
    "attention": (exact.ExactAttention, "forward"),
    "activations": (linear, "activate"),
    "products": (exact.ExactMlp, "forward"),
    "norms": (exact.RowNorm, "forward"),
    "others": (HostStage, "run"),
}


class Clock:
    """Add up processor time by part, and that of the first thread alone."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.first_thread_s = 0.0
        # The time of the parts inside each one that runs.
        self._inside = [0.0]

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Measure each call of a function."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            start, first = time.process_time(), time.thread_time()
            self._inside.append(0.0)
            try:
                return function(*given, **named)
            finally:
                whole = time.process_time() - start
                self.spent[part] += whole - self._inside.pop()
                self._inside[-1] += whole
                if len(self._inside) == 1:
                    self.first_thread_s += time.thread_time() - first

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and the first thread's share."""
        found = {part: self.spent[part] for part in PARTS}
        found["all"] = sum(found.values())
        found["first thread"] = self.first_thread_s / found["all"]
        self.spent.clear()
        self.first_thread_s = 0.0
        return found


def main() -> None:
    """Print milliseconds for each token of a prompt, on one thread and on two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    target = parser.parse_args().json
    clock = Clock()
    for part, (owner, name) in PARTS.items():
        clock.watch(part, owner, name)
    stage, scale = load_stage()
    columns = (*PARTS, "all", "first thread")
    print(f"{'threads':>8}{'code':>10}" + "".join(f"{column:>14}" for column in columns))
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for code, found in measure(clock, stage).items():
            row = {part: found[part] * (1 if part == "first thread" else scale) for part in columns}
            rows.append({"threads": threads, "code": code, "ms_per_token": row})
            print(f"{threads:8}{code:>10}" + "".join(f"{row[column]:14.3f}" for column in columns))
    if target is not None:
        target.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def load_stage() -> tuple[HostStage, float]:
    """Return a stage of some layers, and milliseconds a token of the whole model for a prompt's second."""
    model = Synthetic.parse(MODEL)
    assert model is not None
    config = dict(model.config())
    scale = 1e3 / PROMPT * ModelSpec.from_config(config, MODEL).num_layers / LAYERS
    config["num_hidden_layers"] = LAYERS
    spec = ModelSpec.from_config(config, MODEL)
    source = ModelSource(MODEL, Path(), config, spec, MODEL, describe_tensors(config, spec), seed=3)
    mine = StageAssignment("alpha", 0, LAYERS, embed=True, output=False)
    stage = HostStage.load(source, mine, StageOptions(kernel="exact-f32", require_tags=False))
    stage.make_pools(PROMPT // BLOCK)
    return stage, scale


def measure(clock: Clock, stage: HostStage) -> dict[str, dict[str, float]]:
    """Return the median of rounds in turn, for compiled code and for torch's operators."""
    found: dict[str, list[dict[str, float]]] = {"compiled": [], "torch": []}
    # The first round warms up.
    for number in range(ROUNDS + 1):
        for code, of in found.items():
            with torchs_operators(code == "torch"):
                prefill(stage)
            taken = clock.take()
            if number:
                of.append(taken)
    return {code: {part: median(one[part] for one in of) for part in of[0]} for code, of in found.items()}


@contextmanager
def torchs_operators(used: bool) -> Iterator[None]:
    """Leave attention and activations to torch in the body, if ``used``."""
    if not used:
        yield
        return
    with (
        mock.patch.object(stage_kv, "native_group", return_value=None),
        mock.patch.object(activation, "native_activate", return_value=False),
        mock.patch.object(activation, "exp_library", return_value=None),
    ):
        yield


def prefill(stage: HostStage) -> None:
    """Run a prompt in chunks, and release it."""
    tokens = torch.arange(PROMPT) % 31_991
    for number, start in enumerate(range(0, PROMPT, CHUNK)):
        grant = BlockGrant.append(0, 0, list(range(start // BLOCK, (start + CHUNK) // BLOCK)))
        step = Step(number, [], [grant], [Row(0, start, CHUNK, 1)], b"")
        stage.run(step, None, tokens[start : start + CHUNK])
    stage.apply(Step(PROMPT // CHUNK, [0], [], [], b""))


if __name__ == "__main__":
    main()
