"""Compare linears over stored forms with the float32 linear, on one thread: `python bench/stored_forms.py`.

Each row has a form, its bits for each weight, and the speed over that of float32 in the same seconds, for
some counts of rows. Calls of both take turns, each over copies that together exceed the caches. With `--avx2`
the figures are the speed of AVX2's kernels over that of AVX-512's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.native.build import AVX2, AVX512, InstructionSet
from convoy.model.kernels.native.library import NativeLibrary, find_library
from convoy.model.kernels.pages import ask_huge_pages
from convoy.model.kernels.stored.linear import StoredLinear
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
from convoy.model.kernels.stored.packed import NativeStored, pack_range
from convoy.model.kernels.stored.sample import sample_range, usual_shape

OUTPUTS, INPUTS = 4096, 4096
ROWS = (1, 2, 4, 6, 16, 64, 512)
COPIED_BYTES = 100 << 20
ROUND_S = 0.6
# Float32, and kept forms that are common in files.
FORMS = (
    *("F32", "BF16", "F16", "gguf:Q8_0", "gguf:Q6_K", "gguf:Q5_K", "gguf:Q4_K", "gguf:Q4_0"),
    *("affine4", "affine8", "MXFP4", "F8_E4M3"),
)
Multiply = Callable[[torch.Tensor], torch.Tensor]


class _Compiled:
    """Multiply by one range with the kernels of one instruction set."""

    def __init__(self, one: StoredRange, of: InstructionSet) -> None:
        library = find_library(of)
        assert isinstance(library, NativeLibrary), library
        packed = pack_range(one, [library])
        assert packed is not None, "every form here has a kernel"
        self._outputs, self._native = one.outputs, NativeStored([(0, packed)], None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(x), self._outputs)
        self._native(x, y)
        return y


def main() -> None:
    """Print one line for each form; the arguments choose forms."""
    parser = argparse.ArgumentParser(description="Compare linears over stored forms with others.")
    parser.add_argument("forms", nargs="*", metavar="FORM", help=f"one of {', '.join(FORMS)}; default: all")
    parser.add_argument("--avx2", action="store_true", help="compare AVX2's kernels with AVX-512's instead")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    weight = torch.randn(OUTPUTS, INPUTS)
    plain: list[Multiply] = []
    if not asked.avx2:
        linears = [PackedLinear(weight, None) for _ in range(2)]
        ask_huge_pages(part for linear in linears for part in linear.packed)
        plain = [*linears]
    print("form       bits " + "".join(f"{rows:>8}" for rows in ROWS))
    with torch.inference_mode():
        for form in asked.forms or FORMS:
            one = sample_range(usual_shape(form, INPUTS), OUTPUTS)
            count = -(-COPIED_BYTES // one.num_bytes)
            before: list[Multiply] = plain or [_Compiled(one, AVX512) for _ in range(count)]
            copies: list[Multiply]
            if asked.avx2:
                copies = [_Compiled(one, AVX2) for _ in range(count)]
            else:
                copies = [StoredLinear(StoredMatrix((one,)), None) for _ in range(count)]
            bits = 8 * StoredLinear(StoredMatrix((one,)), None).weight_bytes / weight.numel()
            print(f"{form:10} {bits:4.2f} ", end="")
            for rows in ROWS:
                ratio = _ratio(itertools.cycle(before), itertools.cycle(copies), rows)
                print(f"{ratio:8.2f}", end="", flush=True)
            print()


def _ratio(before: Iterator[Multiply], after: Iterator[Multiply], rows: int) -> float:
    """Return the speed of ``after`` over that of ``before``, for so many rows."""
    x = torch.randn(rows, INPUTS)
    times: tuple[list[float], list[float]] = ([], [])
    # Time of this thread alone, so that other programs disturb less.
    end = time.perf_counter() + ROUND_S
    while time.perf_counter() < end or len(times[0]) < 5:
        for multiply, spent in ((next(before), times[0]), (next(after), times[1])):
            start = time.thread_time()
            multiply(x)
            spent.append(time.thread_time() - start)
    return median(times[0]) / median(times[1])


if __name__ == "__main__":
    main()
