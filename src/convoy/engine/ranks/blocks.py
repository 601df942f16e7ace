"""K/V of sessions over the ranks of a stage: each rank has its own K/V heads, and a saved session has all.

Rank 0 asks the other ranks as a head asks stages (`run.kv_client`), one after the other. It joins their heads
or splits them. If there are fewer K/V heads than ranks, several ranks have the same head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from convoy.engine.run.kv_client import KvClient
from convoy.engine.run.send_guard import SendGuard
from convoy.errors import ConvoyError, StepError
from convoy.model.kv.span_kv import MAX_CARRIED_BYTES
from convoy.model.stage import Stage
from convoy.plan.spec.sharding import Shard, first_kv_head, kv_heads_of
from convoy.transport.link.link import Link
from convoy.wire.messages.control import StageAssignment

# The dimension of heads in [layers, 2, positions, heads, head_dim].
_HEADS = 3


class RankBlocks:
    """Read and write the K/V of all ranks, for rank 0.

    One thread reads and writes, while no step runs; any thread may call `client` and `end`.
    """

    def __init__(
        self,
        own: Stage,
        links: Mapping[int, Link],
        *,
        plan_id: int,
        num_kv_heads: int,
        timeout_s: float,
    ) -> None:
        self._own = own
        self._num_kv_heads = num_kv_heads
        self._world_size = len(links) + 1
        self._guard = SendGuard(lambda: timeout_s)
        mine = own.assignment
        self._carriers = {
            rank: KvClient(
                own,
                [StageAssignment(link.peer, mine.start, mine.end, embed=False, output=False)],
                mine.member,
                {link.peer: link},
                plan_id=plan_id,
                timeout_s=timeout_s,
                guard=self._guard,
            )
            for rank, link in links.items()
        }
        self._rank_of = {link: rank for rank, link in links.items()}

    def client(self, link: Link) -> KvClient | None:
        """Return the client of the rank at the end of ``link``; None for another link."""
        rank = self._rank_of.get(link)
        return None if rank is None else self._carriers[rank]

    def end(self, error: ConvoyError) -> None:
        """End all exchanges with ``error``: no reply comes any more."""
        self._guard.close()
        for carrier in self._carriers.values():
            carrier.end(error)

    def shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of all ranks' K/V together. Raises `StepError` above `MAX_CARRIED_BYTES`."""
        own = self._own.kv_shape(num_layers, num_blocks)
        whole = (*own[:_HEADS], self._num_kv_heads, *own[_HEADS + 1 :])
        if 4 * math.prod(whole) > MAX_CARRIED_BYTES:
            raise StepError(f"{num_blocks} blocks of {num_layers} layers are over {MAX_CARRIED_BYTES} bytes")
        return whole

    def read(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of `Stage.read_blocks` with the heads of all ranks."""
        whole = torch.empty(self.shape(end - start, len(blocks)))
        whole[..., self._heads(0), :] = self._own.read_blocks(start, end, blocks)
        for rank, carrier in self._carriers.items():
            whole[..., self._heads(rank), :] = torch.from_numpy(
                np.ascontiguousarray(carrier.read(start, end, blocks))
            )
        return whole

    def write(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor) -> None:
        """Write K/V as `Stage.write_blocks` does, to every rank; blocks that this rank refuses are not sent
        on.
        """
        wanted = self.shape(kv.shape[0], len(blocks))
        if tuple(kv.shape) != wanted:
            raise StepError(f"K/V of a session has shape {list(kv.shape)}, expected {list(wanted)}")
        self._own.write_blocks(start, blocks, tags, kv[..., self._heads(0), :].contiguous())
        for rank, carrier in self._carriers.items():
            carrier.write(start, blocks, tags, kv[..., self._heads(rank), :].contiguous().numpy())

    def _heads(self, rank: int) -> slice:
        first = first_kv_head(self._num_kv_heads, Shard(rank, self._world_size))
        return slice(first, first + kv_heads_of(self._num_kv_heads, self._world_size))
