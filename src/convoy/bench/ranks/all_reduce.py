"""Measure an all-reduce of two ranks on one machine, by size: sealed, over gloo, and over nccl if available.

Sealed ranks are two processes, as two members are. The ranks of one member are threads of this process, as in
the product. bench/METHODOLOGY.md explains the figures and their limits.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from convoy.bench.hop.connection import bench_member, make_members
from convoy.bench.hop.hop import KIB, MIB, rounds_of
from convoy.bench.hop.names import HOME, HOST
from convoy.bench.hop.pair import first_link
from convoy.bench.ranks.rank import sealed_rank, sums
from convoy.bench.report.clock import Deadline
from convoy.bench.report.percentile import percentile
from convoy.cluster.children import Started, end
from convoy.config.temporary_folder import temporary_folder
from convoy.engine.ranks.sums.local import GLOO, NCCL, LocalRanks
from convoy.engine.ranks.sums.sealed import SealedCollective
from convoy.errors import ConvoyError
from convoy.model.collective import Collective
from convoy.transport.link.link import Link
from convoy.transport.listen.listener import Listener

SEALED = "sealed"
SIZES = (2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 16 * MIB)

_STOP_S = 5.0
_LOG = "rank.log"
_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class AllReduceOptions:
    """Hold the options.

    ``sizes`` are bytes of float32. ``rounds`` are for sizes under 1 MiB; larger ones get a fortieth.
    """

    rounds: int = 1000
    sizes: tuple[int, ...] = SIZES

    def rounds_of(self, num_bytes: int) -> int:
        return rounds_of(self.rounds, num_bytes)

    @property
    def schedule(self) -> list[tuple[int, int]]:
        """Return (bytes, sums), the same for both ranks. The first sums of a size are not measured."""
        return [(size, self.rounds_of(size) + min(_WARM_UP, self.rounds)) for size in self.sizes]


@dataclass(frozen=True, slots=True)
class AllReduceRow:
    """Hold sums of two ranks, as rank 0 measured them.

    ``gb_per_s`` is the bytes of the tensor over the median time.
    """

    through: str
    bytes: int
    p50_us: float
    p90_us: float
    p99_us: float
    gb_per_s: float


def measure_all_reduce(
    options: AllReduceOptions,
    deadline: Deadline,
    say: Callable[[str], None] = lambda _text: None,
    *,
    through: Sequence[str] | None = None,
) -> list[AllReduceRow]:
    """Return rows by way and size. With ``through`` None these are all ways that this machine has.

    Raises `ConvoyError` if the second process does not connect, a rank is lost, or the time is over.
    """
    rows: list[AllReduceRow] = []
    threads = torch.get_num_threads()
    # One core for each rank.
    torch.set_num_threads(1)
    try:
        for way in ways() if through is None else through:
            say(f"{way}: {len(options.sizes)} sizes")
            if way == SEALED:
                with SealedRanks(options) as ranks:
                    rows += _rows(way, ranks.collective, options, deadline)
            else:
                rows += _among_threads(way, options, deadline)
    finally:
        torch.set_num_threads(threads)
    return rows


def ways() -> tuple[str, ...]:
    """Return the collectives that ranks on this machine can use."""
    has_nccl = torch.distributed.is_nccl_available() and torch.cuda.device_count() > 1
    return (SEALED, GLOO, NCCL) if has_nccl else (SEALED, GLOO)


class SealedRanks(Started):
    """Start rank 1 as a process of its own. Leaving the `with` ends it and removes every file."""

    collective: SealedCollective

    def __init__(self, options: AllReduceOptions) -> None:
        super().__init__()
        self._options = options

    def _start(self) -> None:
        directory = self._stack.enter_context(temporary_folder())
        operator_key = make_members(directory)
        links: queue.SimpleQueue[Link] = queue.SimpleQueue()
        with ExitStack() as listening:
            listener = Listener((HOST, 0), bench_member(directory, HOME, operator_key), links.put)
            listening.callback(listener.close)
            log = self._stack.enter_context((directory / _LOG).open("wb"))
            schedule = ",".join(f"{size}x{count}" for size, count in self._options.schedule)
            arguments = [str(directory), operator_key.hex(), str(listener.address[1]), schedule]
            process = subprocess.Popen(
                [sys.executable, "-m", "convoy.bench.ranks.rank", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            self._stack.callback(end, process, _STOP_S)
            link = first_link(links, process, directory / _LOG)
        self._stack.callback(link.close, "the bench is over")
        self.collective = sealed_rank(0, link)


def _rows(
    way: str, collective: Collective, options: AllReduceOptions, deadline: Deadline, device: str = "cpu"
) -> list[AllReduceRow]:
    rows = []
    for size, count in options.schedule:
        deadline.left_s()
        # Leave out the first sums of a size, which warm up buffers and connections.
        times = sums(collective, size, count, device)[count - options.rounds_of(size) :]
        p50_us, p90_us, p99_us = (round(percentile(times, each) * 1e6, 1) for each in (50, 90, 99))
        rows.append(AllReduceRow(way, size, p50_us, p90_us, p99_us, round(size / p50_us / 1e3, 3)))
    return rows


def _among_threads(way: str, options: AllReduceOptions, deadline: Deadline) -> list[AllReduceRow]:
    devices = [f"cuda:{rank}" if way == NCCL else "cpu" for rank in range(2)]
    group = LocalRanks(way, [HOME, HOME])
    failed: list[ConvoyError] = []

    def follow() -> None:
        try:
            for size, count in options.schedule:
                sums(group.ends[1], size, count, devices[1])
        except ConvoyError as error:
            failed.append(error)

    other = threading.Thread(target=follow, name="rank 1", daemon=True)
    other.start()
    try:
        return _rows(way, group.ends[0], options, deadline, devices[0])
    finally:
        other.join(_STOP_S)
        group.abort(ConvoyError("the bench is over"))


def all_reduce_ratios(rows: Sequence[AllReduceRow]) -> dict[str, float]:
    """Return the time of sealed sums over gloo's, which are in clear text, by size."""
    by_key = {(row.through, row.bytes): row for row in rows}
    return {
        f"p50_{size}_bytes_sealed_over_gloo": round(by_key[SEALED, size].p50_us / row.p50_us, 3)
        for (way, size), row in by_key.items()
        if way == GLOO and (SEALED, size) in by_key
    }
