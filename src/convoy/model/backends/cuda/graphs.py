"""Run decodes as captured graphs, one for each bucket of batch sizes, over static inputs and one memory pool.

A decode of many layers is hundreds of short kernels, and Python launches them more slowly than the device
runs them. A captured graph is one launch. Its shapes are fixed, so a batch is padded to the next bucket
with rows that write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from convoy.config.kernels import CAPTURED_ROWS
from convoy.model.backends.cuda.batch import (
    ROW_FIELDS,
    DeviceBatch,
    DeviceGroupBatch,
    HostBatch,
    aligned_sizes,
    fill,
)
from convoy.model.backends.cuda.kernels.attention import DeviceHeadShape, Ints, Launch
from convoy.model.backends.cuda.kernels.sums import DeviceSums
from convoy.model.backends.cuda.memory.staging import Staging, StagingSlot

# Runs before a capture. They compile the kernels and let the libraries allocate their memory, because neither
# may happen during a capture.
_WARM_UPS = 2

# The captured function maps int32 token ids [T], a hidden state that it may overwrite, and the batch to a
# hidden state.
Run = Callable[[torch.Tensor, torch.Tensor, DeviceBatch], torch.Tensor]


@dataclass(frozen=True)
class GraphShape:
    """Hold the properties that all graphs of a stage share."""

    hidden_size: int
    # The most blocks of one sequence, in all its tables together.
    max_blocks: int
    heads: tuple[DeviceHeadShape, ...]  # by cache group
    dtype: torch.dtype
    device: torch.device
    num_units: int  # multiprocessors
    # Set for a rank: its graph must run in step with the graphs of the other ranks.
    sums: DeviceSums | None = None


class DecodeGraph:
    """Hold one captured decode.

    ``memory`` is a pool shared with other graphs, of which one runs at a time.
    """

    def __init__(self, size: int, shape: GraphShape, run: Run, memory: Any) -> None:
        self.size = size
        self._shape = shape
        groups = len(shape.heads)
        sizes = [size, size, groups * size, groups * size * ROW_FIELDS, size * shape.max_blocks]
        self._begins = aligned_sizes(sizes)
        self._ints = torch.zeros(self._begins[-1], dtype=torch.int32, device=shape.device)
        parts = [self._ints[b : b + n] for b, n in zip(self._begins, sizes, strict=False)]
        self._tokens, positions, slots, rows, tables = parts
        slots, rows = slots.view(groups, size), rows.view(groups, size, ROW_FIELDS)
        slots.fill_(-1)
        tiles = torch.zeros(size, 2, dtype=torch.int32, device=shape.device)
        tiles[:, 0] = torch.arange(size, dtype=torch.int32, device=shape.device)
        launches = [
            Launch(tiles, heads.decode_rows, heads.num_splits(size, shape.num_units)) for heads in shape.heads
        ]
        # Kept alive here: the graph reads this memory, and torch does not count the graph as a user of it.
        self._batch = DeviceBatch(
            positions,
            tables,
            tuple(DeviceGroupBatch(slots[i], rows[i], (launches[i],)) for i in range(groups)),
        )
        self._hidden = torch.zeros(size, shape.hidden_size, dtype=shape.dtype, device=shape.device)
        self._out = torch.zeros_like(self._hidden)
        # The bytes and the number of rows of the last batch, from which other ranks fill their graphs.
        self._filled: tuple[npt.NDArray[np.uint8], int] = (np.empty(0, np.uint8), 0)
        self._graph = self._capture(run, memory)

    def fits(self, host: HostBatch) -> bool:
        """Return whether the graph's block tables have room for those of ``host``."""
        return host.tables.size <= self.size * self._shape.max_blocks

    def run(
        self,
        host: HostBatch,
        tokens: Ints | None,
        hidden: torch.Tensor | None,
        staging: Staging,
        feed: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run a batch of at most ``size`` lone tokens, from token ids or hidden states [rows, hidden_size].

        ``feed`` may replace token ids on the device. Returns [rows, hidden_size], which the next run of this
        graph overwrites.
        """
        self.fill(host, tokens, hidden, staging)
        if feed is not None:
            feed(self._tokens)
        if self._shape.sums is not None:
            self._shape.sums.meet()
        self.replay()
        return self.found(len(host.lengths))

    def fill(
        self, host: HostBatch, tokens: Ints | None, hidden: torch.Tensor | None, staging: Staging
    ) -> None:
        """Copy the inputs of the next `replay` to the device. The arguments are those of `run`."""
        num_rows, padded = len(host.lengths), host.padded(self.size)
        ids = np.zeros(self.size, np.int32)
        if tokens is not None:
            ids[:num_rows] = tokens
        parts = [ids, padded.positions, padded.slots, padded.rows, padded.tables]
        used = aligned_sizes([part.size for part in parts])[-1]
        slot = staging.take(4 * used)
        fill(slot.memory[: 4 * used].view(torch.int32), parts)
        self._filled = slot.array[: 4 * used], num_rows
        self._send(slot, 4 * used)
        self._take_in(hidden, staging)

    def fill_like(self, other: DecodeGraph, hidden: torch.Tensor | None, staging: Staging) -> None:
        """Copy the inputs with which another rank's graph was just filled."""
        filled, _ = self._filled = other._filled
        slot = staging.take(len(filled))
        np.copyto(slot.array[: len(filled)], filled)
        self._send(slot, len(filled))
        self._take_in(hidden, staging)

    def _send(self, slot: StagingSlot, num_bytes: int) -> None:
        staged = slot.memory[:num_bytes].view(torch.int32)
        self._ints[: len(staged)].copy_(staged, non_blocking=True)
        slot.done.record(torch.cuda.current_stream(self._shape.device))

    def _take_in(self, hidden: torch.Tensor | None, staging: Staging) -> None:
        if hidden is not None:
            self._hidden[: self._filled[1]].copy_(staging.on_card(hidden))

    def replay(self) -> None:
        """Start the graph.

        Graphs of ranks are started one after the other, with nothing between them that may wait.
        """
        with torch.cuda.device(self._shape.device):
            self._graph.replay()

    def found(self, num_rows: int) -> torch.Tensor:
        """Return the result of the first ``num_rows`` rows, [num_rows, hidden_size]."""
        return self._out[:num_rows]

    def _capture(self, run: Run, memory: Any) -> torch.cuda.CUDAGraph:
        def once() -> None:
            # The layers overwrite their input, and a replay needs the input again.
            self._out.copy_(run(self._tokens, self._hidden.clone(), self._batch))

        stream = torch.cuda.Stream(self._shape.device)  # type: ignore[no-untyped-call]
        # Warm-ups and capture run on a stream of their own: CUDA cannot capture the default stream.
        stream.wait_stream(torch.cuda.current_stream(self._shape.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                once()
        torch.cuda.current_stream(self._shape.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        sums = self._shape.sums
        # Other threads may use other devices during the capture, so only this thread's calls are restricted.
        with (
            nullcontext() if sums is None else sums.captures(),
            torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"),
        ):
            once()
        return graph


class DecodeGraphs:
    """Hold the graphs of a stage. Each is captured when a batch first needs it."""

    def __init__(self, shape: GraphShape, run: Run) -> None:
        self._shape = shape
        self._run = run
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, DecodeGraph] = {}

    def captured(self, num_rows: int) -> DecodeGraph | None:
        """Return the graph for ``num_rows`` rows if it was captured already, else None."""
        return self._graphs.get(_bucket(num_rows) or 0)

    def find(self, num_rows: int) -> DecodeGraph | None:
        """Return the graph for ``num_rows`` rows, captured now if need be.

        Return None above the greatest bucket.
        """
        size = _bucket(num_rows)
        if size is None:
            return None
        if size not in self._graphs:
            self._graphs[size] = DecodeGraph(size, self._shape, self._run, self._memory)
        return self._graphs[size]


def _bucket(num_rows: int) -> int | None:
    return next((bucket for bucket in CAPTURED_ROWS if bucket >= num_rows), None)
