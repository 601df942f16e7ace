"""What a hop costs between two processes of one machine, sealed twice, once and not at all, in one run.

bench/METHODOLOGY.md says what the figures mean and what they do not.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from convoy.bench.carrier import Ask, Carrier
from convoy.bench.machine import Machine, Watch
from convoy.bench.pair import Pair
from convoy.errors import LinkBroken
from convoy.wire.tensor import WireTensor

SEALINGS = ("none", "outer", "both")
KIB, MIB = 1024, 1024 * 1024
SHAPES = {8 * KIB: (1, 2048), 16 * MIB: (2048, 2048)}  # one row, and a prefill chunk, of float32

_LARGE_SHARE = 40
_MIN_LARGE = 5

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class HopOptions:
    """``rounds``: 8 KiB round trips per block and sealing. 16 MiB gets a fortieth of them, but 5 at least."""

    rounds: int = 400
    num_blocks: int = 5

    def rounds_of(self, num_bytes: int) -> int:
        return self.rounds if num_bytes < MIB else max(_MIN_LARGE, self.rounds // _LARGE_SHARE)


@dataclass(frozen=True, slots=True)
class HopRow:
    """Round trips of a tensor of ``bytes``, and one-way throughput; medians of the blocks."""

    bytes: int
    sealing: str
    p50_us: float
    p99_us: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class HopReport:
    """All that a run found, in the order in which it is printed as JSON."""

    bench: str
    machine: Machine
    model: None
    settings: Mapping[str, int | str]
    rows: tuple[HopRow, ...]
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Block:
    p50_us: float
    p99_us: float
    gb_per_s: float


def measure_hop(options: HopOptions, progress: Progress | None = None) -> HopReport:
    """Start the second process, measure, end it. ``progress`` gets (done, all) blocks.

    Raises `ConvoyError` if the two cannot connect or one of them ends.
    """
    watch = Watch()
    blocks: dict[tuple[int, str], list[_Block]] = {}
    num_all = options.num_blocks * len(SHAPES)
    with Pair() as pair:
        tensors = [WireTensor("float32", shape, os.urandom(size)) for size, shape in SHAPES.items()]
        for tensor in tensors:
            _check(pair.carriers, tensor)
        for done, (_, tensor) in enumerate(itertools.product(range(options.num_blocks), tensors)):
            if progress is not None:
                progress(done, num_all)
            for sealing, block in _measure(pair.carriers, tensor, options).items():
                blocks.setdefault((tensor.nbytes, sealing), []).append(block)
        cipher = pair.cipher
    rows = tuple(_row(size, sealing, blocks[size, sealing]) for size in SHAPES for sealing in SEALINGS)
    settings: dict[str, int | str] = {
        "cipher": cipher,
        "num_blocks": options.num_blocks,
        **{f"rounds_{size_name(size)}": options.rounds_of(size) for size in SHAPES},
    }
    return HopReport("hop", watch.machine(), None, settings, rows, ratios_of(rows))


def _check(carriers: Mapping[str, Carrier], tensor: WireTensor) -> None:
    """Every way brings back what was sent; also the warm-up."""
    for sealing, carrier in carriers.items():
        for _ in range(3):
            carrier.send(tensor, Ask.RETURN)
            _, data = carrier.receive()
            if bytes(data) != tensor.data:
                raise LinkBroken(f"a tensor of {tensor.nbytes} bytes came back changed, sealing {sealing}")


def _measure(carriers: Mapping[str, Carrier], tensor: WireTensor, options: HopOptions) -> dict[str, _Block]:
    """One block: round trips taken in turns, so that what else the machine does hits every sealing alike."""
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
    carrier.send(tensor, Ask.RETURN)
    carrier.receive()
    return time.perf_counter() - started_s


def _gb_per_s(carrier: Carrier, tensor: WireTensor, count: int) -> float:
    """``count`` tensors one after the other; the clock stops when the other end says that it has the last."""
    started_s = time.perf_counter()
    for _ in range(count - 1):
        carrier.send(tensor, Ask.KEEP)
    carrier.send(tensor, Ask.CONFIRM)
    carrier.receive()
    return count * tensor.nbytes / (time.perf_counter() - started_s) / 1e9


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of all do not exceed (nearest rank); no value is made up."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


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
    """What sealing adds (microseconds) and leaves (a fraction), from the rows of one run."""
    by_key = {(row.bytes, row.sealing): row for row in rows}
    ratios: dict[str, float] = {}
    for size in SHAPES:
        name = size_name(size)
        for sealing, other in (("both", "none"), ("outer", "none"), ("both", "outer")):
            one, two = by_key[size, sealing], by_key[size, other]
            ratios[f"p50_{name}_{sealing}_minus_{other}_us"] = round(one.p50_us - two.p50_us, 1)
            ratios[f"p50_{name}_{sealing}_over_{other}"] = round(one.p50_us / two.p50_us, 3)
            ratios[f"gb_per_s_{name}_{sealing}_over_{other}"] = round(one.gb_per_s / two.gb_per_s, 3)
    return ratios


def size_name(num_bytes: int) -> str:
    """8192 as "8KiB"."""
    return f"{num_bytes // MIB}MiB" if num_bytes >= MIB else f"{num_bytes // KIB}KiB"
