"""Measure products by codes and scales on CUDA: ``python -m comparisons.cuda.forms FILE``.

Linears have the shapes of Llama 3 8B. Several copies of each take turns, so that no weight is in a cache.
They are captured, and compared with the library's in bfloat16. `comparisons.cuda.single` measures whole steps
with ``--kernel cuda-int4``. `support.format_errors`, of the tests, measures the effect of rounding on logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from comparisons.cuda.single import Findings, measure_machine, replayed_ms
from convoy.model.backends.cuda.kernels.few_rows import FEW_TILES, MAX_FEW, few_rows
from convoy.model.backends.cuda.kernels.float8 import round_to_float8
from convoy.model.backends.cuda.kernels.forms import DeviceMatrix, Matrix
from convoy.model.backends.cuda.kernels.linears import multiply
from convoy.model.backends.cuda.kernels.packing import pack_matrix
from convoy.model.backends.cuda.kernels.single_row import CODE_TILES, lone_linear
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.sample import sample_range, usual_shape

SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
# Weights and rows rounded to floats of 8 bits, as `--compute fp8` does.
FLOAT8 = "fp8"
FORMS = ("bf16", FLOAT8, "centred4", "affine4", "gguf:Q4_K", "centred8", "gguf:Q6_K", "F8_E4M3")
ROWS = (1, 4, 16, 64, 128, 256, 2048)
# Bytes of all copies of a matrix: several times the size of a cache.
_LEAST_BYTES = 256 << 20
_ROUNDS = 5
# Outputs that are drawn. The others repeat them, which takes the same time.
_DRAWN = 512

# Called with the number of a copy.
Work = Callable[[int], object]


def measure_forms(findings: Findings, forms: Sequence[str], rows: Sequence[int], *, sweeps: bool) -> None:
    """Measure every shape in each form. With ``sweeps`` every tile is measured beside the chosen one."""
    found: list[dict[str, object]] = []
    for name, shape in SHAPES.items():
        for form in forms:
            copies = _copies(form, *shape)
            for num_rows in rows:
                if findings.over:
                    return
                for by, work in _works(copies, name, num_rows, sweeps=sweeps):
                    us = 1000 * replayed_ms(partial(_each, work, len(copies)), _ROUNDS) / len(copies)
                    found.append(
                        {
                            "linear": name,
                            "form": form,
                            "rows": num_rows,
                            "by": by,
                            "us": round(us, 2),
                            "gb_per_s": round(copies[0].nbytes / us / 1e3),
                        }
                    )
                findings.add("linears", found)


def _copies(form: str, outputs: int, inputs: int) -> list[Matrix]:
    if form == "bf16":
        dense = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        return [dense.clone() for _ in range(max(2, _LEAST_BYTES // dense.nbytes))]
    if form == FLOAT8:
        drawn = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        rounded = round_to_float8(drawn, form)
        return [_copy(rounded) for _ in range(max(2, _LEAST_BYTES // rounded.nbytes))]
    one = replace(sample_range(usual_shape(form, inputs), _DRAWN), rounded="")
    whole = one.rows(torch.arange(outputs) % _DRAWN)
    matrix = pack_matrix(StoredMatrix((whole,)), torch.device("cuda"))
    return [_copy(matrix) for _ in range(max(2, _LEAST_BYTES // matrix.nbytes))]


def _copy(matrix: DeviceMatrix) -> DeviceMatrix:
    ranges = tuple(replace(one, codes=one.codes.clone()) for one in matrix.ranges)
    return DeviceMatrix(ranges, matrix.rounds_rows)


def _works(copies: Sequence[Matrix], name: str, num_rows: int, *, sweeps: bool) -> Iterator[tuple[str, Work]]:
    """Yield what is measured, each with its name."""
    x = torch.randn(num_rows, copies[0].shape[1], device="cuda", dtype=torch.bfloat16)
    dense = [one for one in copies if isinstance(one, torch.Tensor)]
    if dense:
        yield "library", lambda i: linear(x, dense[i])
        return
    coded = [one for one in copies if isinstance(one, DeviceMatrix)]
    if num_rows > 1:
        yield "chosen", lambda i: multiply(x, copies[i])
    gated = name == "gate_up"
    if num_rows == 1:
        lone = partial(lone_linear, x, norm=x[0] if name in ("qkv", "gate_up", "head") else None, gated=gated)
        yield "chosen", lambda i: lone(copies[i])
        for tile in CODE_TILES if sweeps else ():
            text = f"{tile.outputs}x{tile.inputs}/{tile.num_warps}"
            yield text, lambda i, tile=tile: lone(copies[i], tile=tile)  # type: ignore[misc]
    elif num_rows <= MAX_FEW:
        for few in FEW_TILES if sweeps else ():
            text = f"{few.outputs}/{few.splits}/{few.num_warps}/{few.num_stages}"
            yield text, lambda i, few=few: few_rows(x, coded[i], None, few)  # type: ignore[misc]


def _each(work: Work, count: int) -> None:
    for number in range(count):
        work(number)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(prog="comparisons.cuda.forms", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--sweeps", action="store_true", help="measure every tile")
    parser.add_argument("--max-seconds", type=float, default=240.0)
    chosen = parser.parse_args(arguments)
    findings = Findings(chosen.file, time.monotonic() + chosen.max_seconds)
    findings.add("machine", measure_machine())
    rows = [int(one) for one in chosen.rows.split(",")]
    with torch.inference_mode():
        measure_forms(findings, chosen.forms.split(","), rows, sweeps=chosen.sweeps)


if __name__ == "__main__":
    main()
