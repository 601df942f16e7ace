"""Compare linears over stored forms with the float32 linear, on one thread: `python bench/stored_forms.py`.

Each row has a form, its bits for each weight, and the speed over that of float32 in the same seconds, for
some counts of rows. Calls of both take turns, each over copies that together exceed the caches.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from statistics import median

import torch

from convoy.model.kernels.linear import PackedLinear, pad_rows
from convoy.model.kernels.pages import ask_huge_pages
from convoy.model.kernels.stored.linear import StoredLinear
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.packed import part_widths, sample_range

OUTPUTS, INPUTS = 4096, 4096
ROWS = (1, 2, 4, 6, 16, 64, 512)
COPIED_BYTES = 100 << 20
ROUND_S = 0.6
# Kept forms that are common in files.
FORMS = (
    *("BF16", "F16", "gguf:Q8_0", "gguf:Q6_K", "gguf:Q5_K", "gguf:Q4_K", "gguf:Q4_0"),
    *("affine4", "affine8", "MXFP4", "F8_E4M3"),
)


def main() -> None:
    """Print one line for each form; the arguments choose forms."""
    torch.set_num_threads(1)
    weight = torch.randn(OUTPUTS, INPUTS)
    plain = [PackedLinear(weight, None) for _ in range(2)]
    ask_huge_pages(part for linear in plain for part in linear.packed)
    print("form       bits " + "".join(f"{rows:>8}" for rows in ROWS))
    with torch.inference_mode():
        for form in sys.argv[1:] or FORMS:
            one = sample_range(form, (OUTPUTS, INPUTS), *part_widths(form, INPUTS))
            matrix = StoredMatrix((one,))
            copies = [StoredLinear(matrix, None) for _ in range(-(-COPIED_BYTES // matrix.num_bytes))]
            ratios = (_ratio(itertools.cycle(plain), itertools.cycle(copies), rows) for rows in ROWS)
            bits = 8 * copies[0].weight_bytes / weight.numel()
            print(f"{form:10} {bits:4.2f} ", end="")
            for ratio in ratios:
                print(f"{ratio:8.2f}", end="", flush=True)
            print()


def _ratio(plain: Iterator[PackedLinear], stored: Iterator[PackedLinear], rows: int) -> float:
    x = torch.randn(rows, INPUTS)
    padded = pad_rows(x, 1)
    times: tuple[list[float], list[float]] = ([], [])
    # Time of this thread alone, so that other programs disturb less.
    end = time.perf_counter() + ROUND_S
    while time.perf_counter() < end or len(times[0]) < 5:
        for linear, given, spent in ((next(plain), padded, times[0]), (next(stored), x, times[1])):
            start = time.thread_time()
            linear(given)
            spent.append(time.thread_time() - start)
    return median(times[0]) / median(times[1])


if __name__ == "__main__":
    main()
