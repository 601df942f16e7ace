"""The number of K/V blocks of each cache group that every member has room for, beside its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from convoy.config.table import HOST_BATCH
from convoy.plan.spec.cache import CacheGroup

# Tokens of K/V for each sequence that runs at once: a chat's prompt and answer.
_TOKENS_AT_ONCE = 1024


@dataclass(frozen=True)
class BlockDemand:
    """Hold the head's demand: room for ``max_batch`` sequences of ``max_context`` tokens, or less.

    A nonzero ``num_blocks`` is the number it asks of each group, and no table is longer.
    """

    # In tokens.
    block_size: int
    # In tokens.
    max_context: int
    # In sequences.
    max_batch: int
    max_row_tokens: int
    num_blocks: int = 0

    @property
    def most(self) -> int:
        """Return the blocks of a group that keeps every token."""
        return self.num_blocks or self.max_batch * -(-self.max_context // self.block_size)


@dataclass(frozen=True)
class Room:
    """Hold a member's memory beside its weights, and the bytes of a block of each cache group."""

    num_bytes: int
    block_bytes: Sequence[int]


@dataclass(frozen=True)
class BlockChoice:
    """Hold ``num_blocks`` by cache group; ``most`` is the largest, and ``tightest`` sets it."""

    num_blocks: tuple[int, ...]
    most: int
    tightest: str


def choose_blocks(
    groups: Sequence[CacheGroup], rooms: Mapping[str, Room], demand: BlockDemand
) -> BlockChoice:
    """Return the counts that fit all members, by name; 0 if one member has no room for a block of each group.

    Rings only serve sequences that run at once. So there are rings for a full batch. If they would take more
    than half of a member's room from groups that keep every token, there are rings for fewer sequences, but
    for one at least.
    """
    pools = _Pools(groups, demand)
    num_rings = demand.max_batch
    if None in pools.rings:
        fitting = (_largest(num_rings, partial(pools.rings_fit, room)) for room in rooms.values())
        num_rings = max(1, min(fitting))
    most = {name: _largest(demand.most, partial(pools.fit, room, num_rings)) for name, room in rooms.items()}
    tightest = min(most, key=lambda name: most[name])
    return BlockChoice(tuple(pools.counts(num_rings, most[tightest])), most[tightest], tightest)


def batch_for_room(most: int, num_tokens: int | None) -> int:
    """Return how many sequences may run at once with K/V for ``num_tokens``: ``most``, or fewer.

    Each has room for 1,024 tokens, because one that runs out of K/V begins again. There are 32 in any case,
    as on a host. None stands for K/V that takes the same memory for any number of tokens.
    """
    if num_tokens is None:
        return most
    return min(most, max(HOST_BATCH, num_tokens // _TOKENS_AT_ONCE))


class _Pools:
    """Compute the pools for a number of rings, and at most ``most`` blocks of each group."""

    def __init__(self, groups: Sequence[CacheGroup], demand: BlockDemand) -> None:
        self._most, self._max_batch = demand.most, demand.max_batch
        self._strides = [group.stride for group in groups]
        self.rings = [group.ring_blocks(demand.block_size, demand.max_row_tokens) for group in groups]

    def counts(self, num_rings: int, most: int) -> list[int]:
        pairs = zip(self.rings, self._strides, strict=True)
        return [
            self._spread(most, stride) if ring is None else min(most, num_rings * ring)
            for ring, stride in pairs
        ]

    def _spread(self, most: int, stride: int) -> int:
        """Return the blocks for ``most`` tokens' worth of rows that each stand for ``stride`` tokens.

        A sequence's last block may be almost empty, so there is one more for each sequence.
        """
        return most if stride == 1 else min(most, -(-most // stride) + self._max_batch)

    def rings_fit(self, room: Room, num_rings: int) -> bool:
        """Return whether the rings fit in half of the room."""
        pairs = zip(self.rings, self.counts(num_rings, self._most), room.block_bytes, strict=True)
        return 2 * sum(count * size for ring, count, size in pairs if ring is not None) <= room.num_bytes

    def fit(self, room: Room, num_rings: int, most: int) -> bool:
        pairs = zip(self.counts(num_rings, most), room.block_bytes, strict=True)
        return sum(count * size for count, size in pairs) <= room.num_bytes


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to ``limit`` that fits, as all smaller ones do; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
