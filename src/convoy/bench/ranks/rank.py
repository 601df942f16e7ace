"""Run one rank of the all-reduce bench, and the second process, which is rank 1.

Started as ``python -m convoy.bench.ranks.rank DIRECTORY OPERATOR_KEY PORT BYTESxSUMS,...``. It ends when it
is done or the link ends, however the first process ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

import torch

from convoy.bench.hop.connection import bench_member
from convoy.bench.hop.names import ECHO, HOME, HOST
from convoy.engine.ranks.sums.sealed import RANK_TYPES, SealedCollective
from convoy.errors import ConvoyError, StepError
from convoy.model.collective import Collective
from convoy.transport.dial import dial
from convoy.transport.link.link import Link, Received

_START_S = 10.0
_LINGER_S = 30.0
_GENERATION = 1


def sealed_rank(rank: int, link: Link, over: threading.Event | None = None) -> SealedCollective:
    """Return one of two ranks, with the link started. ``over`` is set at the link's end."""
    collective = SealedCollective(rank, 2, {1 - rank: link}, _GENERATION)

    def deliver(link: Link, received: Received) -> None:
        if not collective.deliver(link, received):
            raise StepError("the other rank sent a message that is no part of a sum")

    def ended(link: Link, error: ConvoyError) -> None:
        collective.link_ended(link, error)
        if over is not None:
            over.set()

    link.start(deliver, ended, RANK_TYPES)
    return collective


def sums(collective: Collective, num_bytes: int, count: int, device: str = "cpu") -> list[float]:
    """Return the seconds of each of ``count`` sums. Raises `CollectiveError`."""
    x = torch.ones(num_bytes // 4, device=device)
    times = []
    for _ in range(count):
        started_s = time.perf_counter()
        total = collective.all_reduce(x)
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_s)
    assert float(total[-1]) == collective.world_size, "the sum is wrong"
    return times


def main(arguments: list[str]) -> None:
    """Connect, add as often as the schedule says, and wait for the end of the link."""
    directory, operator_key, port = Path(arguments[0]), bytes.fromhex(arguments[1]), int(arguments[2])
    torch.set_num_threads(1)
    me = bench_member(directory, ECHO, operator_key)
    link = dial((HOST, port), me=me, peer_name=HOME, timeout_s=_START_S)
    over = threading.Event()
    collective = sealed_rank(1, link, over)
    # The first process reports the error.
    with contextlib.suppress(ConvoyError):
        for entry in arguments[3].split(","):
            size, count = map(int, entry.split("x"))
            sums(collective, size, count)
        collective.rest()
        over.wait(_LINGER_S)
    link.close()


if __name__ == "__main__":
    main(sys.argv[1:])
