"""Describe a step's rows for the kernels: one run of 32-bit integers, copied to the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from convoy.model.backends.cuda.kernels.attention import DeviceHeadShape, Ints, Launch, cut_tiles
from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row, Step

# Number of fields of a row's description, see `kernels.paged`.
ROW_FIELDS = 5
# In integers: the kernels' loads of 16 bytes and more may begin at multiples of this.
_ALIGNED = 16


@dataclass(frozen=True)
class HostBatch:
    """Describe the rows of a step on the host, as int32 arrays."""

    lengths: Ints  # [num_rows], tokens
    positions: Ints  # [T]
    slots: Ints  # [num_groups, T]: block * block_size + offset
    # [num_groups, num_rows, 5], see `kernels.paged`.
    rows: Ints
    # The tables of all groups and rows, one after the other.
    tables: Ints

    def padded(self, size: int) -> HostBatch:
        """Return this batch of lone tokens, padded to ``size`` rows.

        The added rows have no token and write nothing.
        """
        missing = size - len(self.lengths)
        if not missing:
            return self
        return replace(
            self,
            positions=np.pad(self.positions, (0, missing)),
            # Slot -1 makes the kernels skip the write.
            slots=np.pad(self.slots, ((0, 0), (0, missing)), constant_values=-1),
            rows=np.pad(self.rows, ((0, 0), (0, missing), (0, 0))),
        )

    @property
    def is_decode(self) -> bool:
        """Return whether every row has exactly one token."""
        return len(self.positions) == len(self.lengths)


@dataclass(frozen=True)
class CheckedStep:
    """Hold an applied step, its rows in kernel form (None for a step without rows), and its inputs."""

    step: Step
    host: HostBatch | None
    hidden: torch.Tensor | None
    ids: torch.Tensor | None
    # Samples on the device that negative ids name.
    fed: torch.Tensor | None = None

    @property
    def told(self) -> Ints | None:
        """Return the token ids as the kernels take them: int32, or None without token ids."""
        return None if self.ids is None else self.ids.numpy().astype(np.int32)


@dataclass(frozen=True)
class DeviceGroupBatch:
    """Hold the inputs of one cache group's layers: ``slots`` int32 [T], ``rows`` int32 [num_rows, 5]."""

    slots: torch.Tensor
    rows: torch.Tensor
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class DeviceBatch:
    """Hold a batch on the device, for one run of the layers."""

    positions: torch.Tensor  # int32 [T]
    tables: torch.Tensor  # int32
    groups: tuple[DeviceGroupBatch, ...]


def describe_rows(rows: Sequence[tuple[Row, BlockTable]], num_groups: int, block_size: int) -> HostBatch:
    """Return the host description of checked, non-empty ``rows``, with a block table for each cache group."""
    starts = np.array([row.start for row, _ in rows], dtype=np.int32)
    lengths = np.array([row.num_tokens for row, _ in rows], dtype=np.int32)
    offsets = np.cumsum(lengths, dtype=np.int32) - lengths
    positions = np.arange(int(lengths.sum()), dtype=np.int32) + np.repeat(starts - offsets, lengths)
    slots, described, tables, done = [], [], [], 0
    for group in range(num_groups):
        sizes = np.array([len(table.blocks[group]) for _, table in rows], dtype=np.int32)
        blocks = chain.from_iterable(table.blocks[group] for _, table in rows)
        flat = np.fromiter(blocks, np.int32, int(sizes.sum()))
        first = np.cumsum(sizes, dtype=np.int32) - sizes
        # A table with fewer blocks than the sequence is a ring (a window), so the index wraps at its size.
        entry = np.repeat(first, lengths) + positions // block_size % np.repeat(sizes, lengths)
        slots.append(flat[entry] * block_size + positions % block_size)
        described.append(np.stack((offsets, lengths, starts, first + done, sizes), axis=1))
        tables.append(flat)
        done += len(flat)
    return HostBatch(lengths, positions, np.stack(slots), np.stack(described), np.concatenate(tables))


def pack(parts: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Return each of ``parts`` on the device, in its shape.

    One asynchronous copy from pinned memory moves all of them.
    """
    begins = aligned_sizes([part.size for part in parts])
    # Torch reuses pinned memory only after the copy out of it has finished, so freeing it here is safe.
    staged = torch.empty(begins[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    fill(staged, parts)
    flat = staged.to(device, non_blocking=True)
    return [
        flat[begin : begin + part.size].view(part.shape)
        for begin, part in zip(begins[:-1], parts, strict=True)
    ]


def fill(staged: torch.Tensor, parts: Sequence[Ints]) -> int:
    """Write ``parts`` one after the other, each aligned. Return the number of integers in use."""
    into = staged.numpy()
    done = 0
    for part in parts:
        into[done : done + part.size] = part.reshape(-1)
        done += _room(part.size)
    return done


def aligned_sizes(sizes: Sequence[int]) -> list[int]:
    """Return where each part of the given sizes begins, and as the last item where all of them end."""
    return [0, *(int(end) for end in np.cumsum([_room(size) for size in sizes]))]


def on_device(
    host: HostBatch, tokens: Ints, shapes: Sequence[DeviceHeadShape], device: torch.device, num_units: int
) -> tuple[DeviceBatch, torch.Tensor]:
    """Return a batch of any rows, and its ``tokens`` [T] (possibly empty), for a run without a graph.

    ``shapes`` has one head shape for each cache group.
    """
    tiles = [cut_tiles(host.lengths, shape) for shape in shapes]
    parts = [host.positions, host.tables, tokens, *host.slots, *host.rows, *chain.from_iterable(tiles)]
    positions, tables, ids, *others = pack(parts, device)
    count = len(shapes)
    slots, rows, cut = others[:count], others[count : 2 * count], others[2 * count :]
    groups = tuple(
        DeviceGroupBatch(slots[i], rows[i], _launches(shape, cut[2 * i], cut[2 * i + 1], num_units))
        for i, shape in enumerate(shapes)
    )
    return DeviceBatch(positions, tables, groups), ids


def _launches(
    shape: DeviceHeadShape, lone: torch.Tensor, long: torch.Tensor, num_units: int
) -> tuple[Launch, ...]:
    found = []
    if len(lone):
        found.append(Launch(lone, shape.decode_rows, shape.num_splits(len(lone), num_units)))
    if len(long):
        found.append(Launch(long, shape.prefill_rows, 1))
    return tuple(found)


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
