"""Helpers for the tests of the CUDA kernels: whether they can run, and batches of random rows."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from convoy.model.backends.cuda.kernels.attention import DeviceHeadShape, Pool

# With TRITON_INTERPRET=1 the kernels run on the host, slowly: to look for mistakes without a device.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_not() -> str | None:
    """Return why the kernels cannot run here, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None if torch.cuda.is_available() or INTERPRETED else "no CUDA device"


@dataclass(frozen=True)
class Drawn:
    """Hold random rows over a pool: (position of the first token, number of tokens, blocks) each."""

    query: torch.Tensor
    pool: Pool
    rows: list[tuple[int, int, list[int]]]


def draw_rows(
    shape: DeviceHeadShape, spans: list[tuple[int, int]], device: torch.device, *, ring: int | None = None
) -> Drawn:
    """Draw random rows. ``spans`` are (position of the first token, number of tokens).

    Blocks lie scattered in the pool. With ``ring`` a table has at most that many blocks.
    """
    from convoy.model.backends.cuda.kernels.attention import Pool

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts = [-(-(start + length) // shape.block_size) for start, length in spans]
    counts = [min(count, ring) if ring else count for count in counts]
    generator = torch.Generator().manual_seed(5)
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    rows = [
        (start, length, [free.pop() for _ in range(count)])
        for (start, length), count in zip(spans, counts, strict=True)
    ]
    size = (num_blocks, shape.num_kv_heads, shape.block_size)
    keys = torch.randn(*size, shape.head_dim, generator=generator)
    values = torch.randn(*size, shape.value_dim, generator=generator)
    num_tokens = sum(length for _, length in spans)
    query = torch.randn(num_tokens, shape.num_heads * shape.head_dim, generator=generator)
    pool = Pool(keys.to(device, dtype), values.to(device, dtype))
    return Drawn(query.to(device, dtype), pool, rows)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||found - expected|| / ||expected||, or infinity if it is not finite."""
    found, expected = found.double(), expected.double()
    error = ((found - expected).norm() / expected.norm()).item()
    return error if np.isfinite(error) else float("inf")
