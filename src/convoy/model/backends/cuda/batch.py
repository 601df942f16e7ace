"""A step's rows as the kernels take them: one run of 32-bit integers, copied to the device in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from convoy.model.backends.cuda.kernels.attention import DeviceHeadShape, Ints, Launch, cut_tiles
from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row

ROW_FIELDS = 5  # of a row's description, see `gpu.paged`
_ALIGNED = 16  # integers: where the kernels' loads of 16 bytes and more may begin


@dataclass(frozen=True)
class HostBatch:
    """The rows of a step on the host, int32."""

    lengths: Ints  # [num_rows], tokens
    positions: Ints  # [T]
    slots: Ints  # [num_groups, T]: block * block_size + offset
    rows: Ints  # [num_groups, num_rows, 5], see `gpu.paged`
    tables: Ints  # of all groups and rows, one behind the other

    def padded(self, size: int) -> HostBatch:
        """A batch of lone tokens with rows of none behind it, ``size`` in all, which write nothing."""
        missing = size - len(self.lengths)
        if not missing:
            return self
        return replace(
            self,
            positions=np.pad(self.positions, (0, missing)),
            slots=np.pad(self.slots, ((0, 0), (0, missing)), constant_values=-1),
            rows=np.pad(self.rows, ((0, 0), (0, missing), (0, 0))),
        )

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token."""
        return len(self.positions) == len(self.lengths)


@dataclass(frozen=True)
class DeviceGroupBatch:
    """What the layers of one cache group need: ``slots`` int32 [T], ``rows`` int32 [num_rows, 5]."""

    slots: torch.Tensor
    rows: torch.Tensor
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class DeviceBatch:
    """The same on the device, for one run of the layers."""

    positions: torch.Tensor  # int32 [T]
    tables: torch.Tensor  # int32
    groups: tuple[DeviceGroupBatch, ...]


def describe_rows(rows: Sequence[tuple[Row, BlockTable]], num_groups: int, block_size: int) -> HostBatch:
    """Describe checked, non-empty ``rows``."""
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
        # a table that ends early is a ring
        entry = np.repeat(first, lengths) + positions // block_size % np.repeat(sizes, lengths)
        slots.append(flat[entry] * block_size + positions % block_size)
        described.append(np.stack((offsets, lengths, starts, first + done, sizes), axis=1))
        tables.append(flat)
        done += len(flat)
    return HostBatch(lengths, positions, np.stack(slots), np.stack(described), np.concatenate(tables))


def pack(parts: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Each of ``parts`` on the device, in its shape: one copy from pinned memory, which nobody waits for."""
    begins = aligned_sizes([part.size for part in parts])
    # torch keeps pinned memory for the next, once the copy out of it is over
    staged = torch.empty(begins[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    fill(staged, parts)
    flat = staged.to(device, non_blocking=True)
    return [
        flat[begin : begin + part.size].view(part.shape)
        for begin, part in zip(begins[:-1], parts, strict=True)
    ]


def fill(staged: torch.Tensor, parts: Sequence[Ints]) -> int:
    """Write ``parts`` one behind the other, each aligned. Returns how many integers are in use."""
    into = staged.numpy()
    done = 0
    for part in parts:
        into[done : done + part.size] = part.reshape(-1)
        done += _room(part.size)
    return done


def aligned_sizes(sizes: Sequence[int]) -> list[int]:
    """Where each part of so many integers begins, and last where they all end."""
    return [0, *(int(end) for end in np.cumsum([_room(size) for size in sizes]))]


def on_device(
    host: HostBatch, tokens: Ints, shapes: Sequence[DeviceHeadShape], device: torch.device, num_units: int
) -> tuple[DeviceBatch, torch.Tensor]:
    """A batch of any rows, and its ``tokens`` [T] (or none), for one run that is not captured.

    ``shapes`` are those of the cache groups.
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
