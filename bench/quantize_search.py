"""Compare the search for codes and scales in compiled code with torch's: `python bench/quantize_search.py`.

Each row has the bits, and millions of weights for each second of one core's time: by torch's operators, and
by each instruction set. All take turns in one process over the same matrix.
"""

from __future__ import annotations

import functools
import time

import torch

from convoy.model.kernels.native.library import native_libraries
from convoy.model.quantize.search import input_weights, round_by_library, round_by_torch

OUTPUTS, INPUTS = 4096, 4096
# As `round_matrix` takes them: 1 MiB of float32.
ROWS = 64
ROUNDS = 5


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    matrix = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(20))
    weights = input_weights(matrix)
    ways = {"torch": round_by_torch}
    for library in native_libraries():
        ways[library.instruction_set.name] = functools.partial(round_by_library, library)
    print("bits", *(f"{name:>9}" for name in ways))
    for bits in (4, 8):
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, way in ways.items():
                started = time.process_time()
                for start in range(0, OUTPUTS, ROWS):
                    way(matrix[start : start + ROWS], weights, bits)
                least[name] = min(least[name], time.process_time() - started)
        print(f"{bits:4}", *(f"{matrix.numel() / 1e6 / one:9.0f}" for one in least.values()))


if __name__ == "__main__":
    main()
