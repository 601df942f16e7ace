"""Measure the gain and cost of rounded weights on CUDA: ``python -m comparisons.cuda.rounded FILE``.

Linears have the shapes of Llama 3 8B. Several copies of each take turns, so that no weight is in a cache.
They are captured, and compared with the library's in bfloat16 and torch's own 4-bit product.
`comparisons.cuda.single` measures whole steps with ``--kernel cuda-int8``. `support.format_errors`, of the
tests, measures the effect of rounding on logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from comparisons.cuda.single import Findings, measure_machine, replayed_ms
from convoy.model.backends.cuda.kernels.few_rows import FEW_TILES
from convoy.model.backends.cuda.kernels.linears import multiply
from convoy.model.backends.cuda.kernels.rounded import round_matrix
from convoy.model.backends.cuda.kernels.single_row import INT4_TILES, INT8_TILES, lone_linear

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
# Bytes of all copies of a matrix: several times the size of a cache.
_LEAST_BYTES = 400 << 20
_ROUNDS = 5
_FEW_ROWS = (64,)
_MANY_ROWS = 2048
_TINYGEMM_GROUP, _TINYGEMM_TILES = 64, 8

# Called with the number of a copy.
Work = Callable[[int], object]


def measure_linears(findings: Findings, copy_gb_per_s: float) -> None:
    """Measure every shape with one row, some and many."""
    rows: list[dict[str, object]] = []
    for name, (outputs, inputs) in SHAPES.items():
        for bits in (16, 8, 4):
            if not findings.over:
                rows += _of_shape(name, outputs, inputs, bits, copy_gb_per_s)
                findings.add("linears", rows)


def _of_shape(name: str, outputs: int, inputs: int, bits: int, copy: float) -> list[dict[str, object]]:
    count = max(2, _LEAST_BYTES * 8 // (outputs * inputs * bits))
    dense = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    rounded = [dense.clone() if bits == 16 else round_matrix(dense, bits) for _ in range(count)]
    floor_us = rounded[0].nbytes / copy / 1e3
    found: list[dict[str, object]] = []

    def add(what: str, num_rows: int, work: Work) -> None:
        ms = replayed_ms(partial(_each, work, count), _ROUNDS)
        us = 1000 * ms / count
        found.append(
            {"linear": name, "bits": bits, "rows": num_rows, "by": what, "us": round(us, 2)}
            | {"floor_share": round(floor_us / us, 3)}
        )

    for num_rows in (1, *_FEW_ROWS, _MANY_ROWS):
        x = torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16)
        if bits == 16:
            add("library", num_rows, lambda i, x=x: linear(x, rounded[i]))  # type: ignore[misc, arg-type]
        elif num_rows == 1:
            for tile in INT4_TILES if bits == 4 else INT8_TILES:
                text = f"{tile.outputs}x{tile.inputs}/{tile.num_warps}"
                gated = name == "gate_up"
                run = partial(lone_linear, x, norm=x[0] if gated else None, gated=gated, tile=tile)
                add(text, 1, lambda i, run=run: run(rounded[i]))  # type: ignore[misc]
        elif num_rows == _MANY_ROWS:
            add("unpacked", num_rows, lambda i, x=x: multiply(x, rounded[i]))  # type: ignore[misc]
        else:
            for few in FEW_TILES:
                text = f"{few.outputs}x{few.inputs}/{few.splits}/{few.num_warps}/{few.num_stages}"
                add(text, num_rows, lambda i, x=x, few=few: multiply(x, rounded[i], tile=few))  # type: ignore[misc]
        if bits == 4 and num_rows < _MANY_ROWS:
            found += _tinygemm(name, dense, x, count)
    return found


def _tinygemm(name: str, dense: torch.Tensor, x: torch.Tensor, count: int) -> list[dict[str, object]]:
    """Measure torch's own 4-bit product, which packs for tensor cores.

    The numbers mean nothing, only the time.
    """
    outputs, inputs = dense.shape
    try:
        numbers = torch.randint(0, 255, (outputs, inputs // 2), device="cuda", dtype=torch.uint8)
        packed = [torch.ops.aten._convert_weight_to_int4pack(numbers, _TINYGEMM_TILES) for _ in range(count)]
        scales = torch.ones(inputs // _TINYGEMM_GROUP, outputs, 2, device="cuda", dtype=torch.bfloat16)
        run = torch.ops.aten._weight_int4pack_mm
        ms = replayed_ms(partial(_each, lambda i: run(x, packed[i], _TINYGEMM_GROUP, scales), count), _ROUNDS)
    except RuntimeError as error:
        return [{"linear": name, "rows": x.shape[0], "by": "torch int4", "error": str(error)[:200]}]
    return [
        {"linear": name, "bits": 4, "rows": x.shape[0], "by": "torch int4", "us": round(1000 * ms / count, 2)}
    ]


def _each(work: Work, count: int) -> None:
    for number in range(count):
        work(number)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(prog="comparisons.cuda.rounded", description=__doc__)
    parser.add_argument("file", type=Path)
    chosen = parser.parse_args(arguments)
    findings = Findings(chosen.file, time.monotonic() + 240)
    machine = measure_machine()
    findings.add("machine", machine)
    with torch.inference_mode():
        measure_linears(findings, float(str(machine["copy_gb_per_s"])))


if __name__ == "__main__":
    main()
