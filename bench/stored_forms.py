"""Compare linears over stored forms with the float32 linear, on one thread: `python bench/stored_forms.py`.

Each row has a form, its bits for each weight, and the speed over that of float32 in the same seconds, for
some counts of rows. Calls of both take turns, each over copies that together exceed the caches. With `--avx2`
the figures are the speed of AVX2's kernels over that of AVX-512's, and with `--than` the speed of these
kernels over that of another checkout's.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch

from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.native.build import AVX2, AVX512
from convoy.model.kernels.native.library import NativeLibrary, load_library, native_library, why_no_native
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
    """Multiply by one range with the kernels of one library."""

    def __init__(self, one: StoredRange, library: NativeLibrary) -> None:
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
    parser.add_argument(
        "--than", type=Path, help="compare with the kernels of this checkout of Convoy instead"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    weight = torch.randn(OUTPUTS, INPUTS)
    plain: list[Multiply] = []
    own, other = _libraries(asked.avx2, asked.than)
    if other is None:
        linears = [PackedLinear(weight, None) for _ in range(2)]
        ask_huge_pages(part for linear in linears for part in linear.packed)
        plain = [*linears]
    print("form       bits " + "".join(f"{rows:>8}" for rows in asked.rows))
    with torch.inference_mode():
        for form in asked.forms or FORMS:
            one = sample_range(usual_shape(form, INPUTS), OUTPUTS)
            count = -(-COPIED_BYTES // one.num_bytes)
            before: Sequence[Multiply] = plain
            copies: list[Multiply] = []
            if other is None:
                copies += [StoredLinear(StoredMatrix((one,)), None) for _ in range(count)]
            else:
                before = [_Compiled(one, other) for _ in range(count)]
                copies += [_Compiled(one, own) for _ in range(count)]
            bits = 8 * StoredLinear(StoredMatrix((one,)), None).weight_bytes / weight.numel()
            print(f"{form:10} {bits:4.2f} ", end="")
            for rows in asked.rows:
                ratio = _ratio(itertools.cycle(before), itertools.cycle(copies), rows)
                print(f"{ratio:8.2f}", end="", flush=True)
            print()


def _libraries(avx2: bool, than: Path | None) -> tuple[NativeLibrary, NativeLibrary | None]:
    """Return the kernels to measure, and those to compare them with; None compares with float32's linear."""
    if avx2:
        return load_library(AVX2), load_library(AVX512)
    own = native_library()
    assert own is not None, why_no_native()
    if than is None:
        return own, None
    # Its own module compiles it: the names of its sources and its options may differ.
    spec = importlib.util.spec_from_file_location(
        "build_than", than / "src/convoy/model/kernels/native/build.py"
    )
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = build
    spec.loader.exec_module(build)
    of = next(one for one in build.INSTRUCTION_SETS if one.name == own.instruction_set.name)
    return own, load_library(own.instruction_set, build.built_library(of))


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
