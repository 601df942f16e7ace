"""Measure the device memory of a stage beside weights and K/V: captured graphs, and a step's buffers.

It is measured once, after loading, with pools of one block. An estimate would have to know every library's
buffers.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from convoy.config.kernels import CAPTURED_ROWS

_log = logging.getLogger(__name__)

# Tokens of the measured step. A step of more tokens needs more memory.
REHEARSED_TOKENS = 2048
# Tokens of further steps. Their linears are kernels of their own, which are compiled before requests come.
OTHER_TOKENS = (1, 2, 24, 48)


class Rehearsing(Protocol):
    """Declare the part of a stage that `measure_working` uses."""

    device: torch.device

    def make_pools(self, num_blocks: int) -> None: ...

    def capture(self, size: int) -> bool:
        """Capture a decode of ``size`` rows. Return False where decodes are not captured."""

    def rehearse(self, num_tokens: int) -> None:
        """Run every part once, without a sequence."""

    def forget(self) -> None: ...


def measure_working(stage: Rehearsing) -> int:
    """Return the bytes. The stage drops its K/V. Raises PlanError where not even one block fits."""
    device = stage.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    stage.make_pools(1)
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    for num_tokens in (*OTHER_TOKENS, REHEARSED_TOKENS):
        stage.rehearse(num_tokens)
    torch.cuda.synchronize(device)
    running = torch.cuda.max_memory_reserved(device) - reserved
    torch.cuda.empty_cache()
    graphs = _measure_graphs(stage)
    stage.forget()
    torch.cuda.empty_cache()
    _log.info("a step takes %.0f MB beside the weights, and graphs %.0f MB", running / 1e6, graphs / 1e6)
    return running + graphs


def _measure_graphs(stage: Rehearsing) -> int:
    """Return the bytes of all graphs.

    The graphs share one pool, as large as the largest graph needs. The driver keeps further memory for
    each graph.
    """
    reserved, free = torch.cuda.memory_reserved(stage.device), torch.cuda.mem_get_info(stage.device)[0]
    if not stage.capture(CAPTURED_ROWS[-1]):
        return 0
    torch.cuda.synchronize(stage.device)
    pool = torch.cuda.memory_reserved(stage.device) - reserved
    taken = free - torch.cuda.mem_get_info(stage.device)[0]
    # Other processes on the device allocate and free as well. A graph's own memory is therefore taken to be
    # at most its pool or 32 MiB, the larger of both.
    own = min(max(0, taken - pool), max(pool, 1 << 25))
    return pool + own * len(CAPTURED_ROWS)
