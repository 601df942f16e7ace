"""Measure a hop between two processes of one machine, sealed twice, once and not at all, in one run.

bench/METHODOLOGY.md explains the figures and their limits.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from convoy.bench.hop.carrier import Carrier, HopTask
from convoy.bench.hop.pair import HopPair
from convoy.bench.report.clock import Deadline
from convoy.bench.report.percentile import percentile
from convoy.errors import LinkBroken
from convoy.wire.tensor import WireTensor

SEALINGS = ("none", "outer", "both")
KIB, MIB = 1024, 1024 * 1024
# The float32 numbers of a row, which is 8 KiB.
WIDTH = 2048

_LARGE_SHARE = 40
_MIN_LARGE = 5

Progress = Callable[[int, int], None]


def rounds_of(rounds: int, num_bytes: int) -> int:
    """Return ``rounds`` for less than 1 MiB, and a fortieth of them for more, but 5 at least."""
    return rounds if num_bytes < MIB else max(_MIN_LARGE, rounds // _LARGE_SHARE)


@dataclass(frozen=True, slots=True)
class HopOptions:
    """Hold the options.

    ``rounds`` are the round trips per block and sealing for less than 1 MiB. Larger tensors get a fortieth of
    them, but 5 at least. ``rows`` are the sizes, in rows of `WIDTH`: that of a decode, and of a prefill
    chunk.
    """

    rounds: int = 400
    num_blocks: int = 5
    rows: tuple[int, ...] = (1, 2048)

    def rounds_of(self, num_bytes: int) -> int:
        return rounds_of(self.rounds, num_bytes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each tensor."""
        return tuple(4 * WIDTH * count for count in self.rows)


@dataclass(frozen=True, slots=True)
class HopRow:
    """Hold round trips of a tensor of ``bytes``, and one-way throughput; medians of the blocks."""

    bytes: int
    sealing: str
    p50_us: float
    p99_us: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Hold every row of a run, by size and then by sealing."""

    cipher: str
    rows: tuple[HopRow, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    p50_us: float
    p99_us: float
    gb_per_s: float


def measure_hop(options: HopOptions, deadline: Deadline, progress: Progress | None = None) -> Measured:
    """Start the second process, measure, end it. ``progress`` gets (done, all) blocks.

    Raises `ConvoyError` if the two cannot connect, one of them ends, or the time is over.
    """
    blocks: dict[tuple[int, str], list[_Block]] = {}
    num_all = options.num_blocks * len(options.sizes)
    with HopPair() as pair:
        tensors = [
            WireTensor("float32", (count, WIDTH), os.urandom(size))
            for count, size in zip(options.rows, options.sizes, strict=True)
        ]
        for tensor in tensors:
            _check(pair.carriers, tensor)
        for done, (_, tensor) in enumerate(itertools.product(range(options.num_blocks), tensors)):
            deadline.left_s()
            if progress is not None:
                progress(done, num_all)
            for sealing, block in _measure(pair.carriers, tensor, options).items():
                blocks.setdefault((tensor.nbytes, sealing), []).append(block)
        cipher = pair.cipher
    rows = (_row(size, sealing, blocks[size, sealing]) for size in options.sizes for sealing in SEALINGS)
    return Measured(cipher, tuple(rows))


def settings_of(options: HopOptions, cipher: str) -> dict[str, int | float | str | bool]:
    """Return the settings that a report shows beside the rows."""
    rounds = {f"rounds_{size_name(size)}": options.rounds_of(size) for size in options.sizes}
    return {"cipher": cipher, "num_blocks": options.num_blocks, **rounds}


def _check(carriers: Mapping[str, Carrier], tensor: WireTensor) -> None:
    """Check that every way returns the bytes that were sent. This also warms up the connections."""
    for sealing, carrier in carriers.items():
        for _ in range(3):
            carrier.send(tensor, HopTask.RETURN)
            _, data = carrier.receive()
            if bytes(data) != tensor.data:
                raise LinkBroken(f"a tensor of {tensor.nbytes} bytes came back changed, sealing {sealing}")


def _measure(carriers: Mapping[str, Carrier], tensor: WireTensor, options: HopOptions) -> dict[str, _Block]:
    """Measure one block.

    Round trips take turns, so that other work on the machine affects every sealing alike.
    """
    num_rounds = options.rounds_of(tensor.nbytes)
    trips: dict[str, list[float]] = {sealing: [] for sealing in SEALINGS}
    for turn in range(num_rounds):
        for sealing in _rotated(turn):
            trips[sealing].append(_round_trip_s(carriers[sealing], tensor))
    rates = {sealing: _gb_per_s(carriers[sealing], tensor, num_rounds) for sealing in _rotated(num_rounds)}
    return {
        sealing: _Block(percentile(times, 50) * 1e6, percentile(times, 99) * 1e6, rates[sealing])
        for sealing, times in trips.items()
    }


def _rotated(turn: int) -> tuple[str, ...]:
    first = turn % len(SEALINGS)
    return SEALINGS[first:] + SEALINGS[:first]


def _round_trip_s(carrier: Carrier, tensor: WireTensor) -> float:
    started_s = time.perf_counter()
    carrier.send(tensor, HopTask.RETURN)
    carrier.receive()
    return time.perf_counter() - started_s


def _gb_per_s(carrier: Carrier, tensor: WireTensor, count: int) -> float:
    """Send ``count`` tensors one after the other. The clock stops when the other end confirms the last."""
    started_s = time.perf_counter()
    for _ in range(count - 1):
        carrier.send(tensor, HopTask.KEEP)
    carrier.send(tensor, HopTask.CONFIRM)
    carrier.receive()
    return count * tensor.nbytes / (time.perf_counter() - started_s) / 1e9


def _row(size: int, sealing: str, blocks: Sequence[_Block]) -> HopRow:
    def median(values: list[float], digits: int) -> float:
        return round(statistics.median(values), digits)

    return HopRow(
        size,
        sealing,
        median([block.p50_us for block in blocks], 1),
        median([block.p99_us for block in blocks], 1),
        median([block.gb_per_s for block in blocks], 3),
    )


def ratios_of(rows: Sequence[HopRow]) -> dict[str, float]:
    """Return what sealing adds (microseconds) and leaves (a fraction), from the rows of one run."""
    by_key = {(row.bytes, row.sealing): row for row in rows}
    ratios: dict[str, float] = {}
    for size in dict.fromkeys(row.bytes for row in rows):
        name = size_name(size)
        for sealing, other in (("both", "none"), ("outer", "none"), ("both", "outer")):
            one, two = by_key[size, sealing], by_key[size, other]
            ratios[f"p50_{name}_{sealing}_minus_{other}_us"] = round(one.p50_us - two.p50_us, 1)
            ratios[f"p50_{name}_{sealing}_over_{other}"] = round(one.p50_us / two.p50_us, 3)
            ratios[f"gb_per_s_{name}_{sealing}_over_{other}"] = round(one.gb_per_s / two.gb_per_s, 3)
    return ratios


def size_name(num_bytes: int) -> str:
    """Return a size as text: 8192 as "8KiB"."""
    return f"{num_bytes // MIB}MiB" if num_bytes >= MIB else f"{num_bytes // KIB}KiB"
