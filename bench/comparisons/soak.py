"""Measure an idle cluster's use of the processor, and whether its memory grows over many requests.

bench/METHODOLOGY.md explains the figures and their limits.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from convoy.bench.report.clock import Deadline
from convoy.bench.throughput import Say
from convoy.errors import ConvoyError

_SETTLE_S = 2.0
# One in so many requests disconnects after its first piece.
_DROPPED = 10
_NUM_SAMPLES = 10
# Tokens of a prompt, and how often a prompt is long.
_SHORT, _LONG, _ONE_LONG_IN = (4, 40), (41, 400), 8


class WatchedProcess(Protocol):
    """Observe a served cluster and its processes. ``names`` has the head first."""

    @property
    def names(self) -> Sequence[str]: ...

    def ask(self, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the pieces of a streamed completion. Leaving the iterator disconnects."""

    def cpu_s(self, name: str) -> float:
        """Return the seconds of processor time that a member's process has used."""

    def rss_bytes(self, name: str) -> int:
        """Return the resident memory of a member's process."""


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """Hold the options. Memory after ``first`` requests is compared with memory after all.

    Idling is watched for ``idle_s``.
    """

    num_requests: int = 10_000
    first: int = 1_000
    concurrent: int = 8
    max_tokens: int = 4
    idle_s: float = 30.0

    @property
    def stops(self) -> tuple[int, ...]:
        """Return the numbers of requests after which memory is read."""
        step = max(1, (self.num_requests - self.first) // (_NUM_SAMPLES - 1))
        between = range(self.first + step, self.num_requests, step)
        return tuple(dict.fromkeys((self.first, *between, self.num_requests)))


@dataclass(frozen=True, slots=True)
class SoakRow:
    """Hold one member's figures.

    ``idle_core`` is the share of a core without requests, before and after all.
    """

    member: str
    idle_core_before: float
    idle_core_after: float
    rss_mb_first: float
    rss_mb_last: float


@dataclass(frozen=True, slots=True)
class RssRow:
    """Hold a member's resident memory after so many requests. One MB is 10^6 bytes."""

    member: str
    requests: int
    rss_mb: float


@dataclass(frozen=True, slots=True)
class Soaked:
    """Hold the results of a run."""

    members: tuple[SoakRow, ...]
    memory: tuple[RssRow, ...]
    requests_per_s: float


def measure_soak(
    cluster: WatchedProcess, bodies: Bodies, options: SoakOptions, *, deadline: Deadline, say: Say
) -> Soaked:
    """Watch the idle cluster, send every request, and watch it idle again.

    Raises ConvoyError for a request that ends in an error.
    """
    _ask_all(cluster, bodies, range(options.concurrent), options, deadline)
    before = _idle(cluster, options.idle_s, deadline)
    say(f"idle: {sum(before.values()):.2%} of a core")
    memory: list[RssRow] = []
    done, began_s = options.concurrent, time.monotonic()
    for stop in options.stops:
        _ask_all(cluster, bodies, range(done, stop), options, deadline)
        done = stop
        memory += [RssRow(name, stop, round(cluster.rss_bytes(name) / 1e6, 2)) for name in cluster.names]
        shown = ", ".join(f"{row.member} {row.rss_mb:.0f} MB" for row in memory[-len(cluster.names) :])
        say(f"{stop} requests: {shown}")
    rate = (options.num_requests - options.concurrent) / (time.monotonic() - began_s)
    after = _idle(cluster, options.idle_s, deadline)
    return Soaked(soak_rows(cluster.names, before, after, memory), tuple(memory), round(rate, 1))


class Bodies:
    """Make request bodies: short prompts and some long ones, all different; greedy and seeded in turn.

    The long ones make steps of every size, for which a stage makes room once.
    """

    def __init__(self, model_name: str, vocab_size: int, max_tokens: int) -> None:
        self._model_name = model_name
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens

    def of(self, number: int) -> dict[str, Any]:
        rng = random.Random(number)  # noqa: S311 - not a secret
        length = rng.randint(*(_LONG if number % _ONE_LONG_IN == 0 else _SHORT))
        return {
            "model": self._model_name,
            "prompt": [rng.randrange(self._vocab_size) for _ in range(length)],
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "temperature": 0.8 * (number % 2),
            "seed": number,
        }


def _ask_all(
    cluster: WatchedProcess, bodies: Bodies, numbers: range, options: SoakOptions, deadline: Deadline
) -> None:
    failed = threading.Event()

    def ask(number: int) -> None:
        if failed.is_set():
            return
        try:
            deadline.left_s()
            pieces = cluster.ask(bodies.of(number))
            for _ in pieces:
                # Disconnect early now and then: an aborted request must free its memory too.
                if number % _DROPPED == _DROPPED - 1:
                    break
            getattr(pieces, "close", lambda: None)()
        except ConvoyError:
            failed.set()
            raise

    with ThreadPoolExecutor(options.concurrent) as pool:
        for _ in pool.map(ask, numbers):
            pass


def _idle(cluster: WatchedProcess, idle_s: float, deadline: Deadline) -> dict[str, float]:
    """Return each member's share of a core without requests."""
    # Time itself is measured here, so there is nothing else to wait for.
    time.sleep(min(_SETTLE_S, idle_s, deadline.left_s()))
    began_s = time.monotonic()
    used = {name: cluster.cpu_s(name) for name in cluster.names}
    time.sleep(min(idle_s, deadline.left_s()))
    passed_s = time.monotonic() - began_s
    return {name: (cluster.cpu_s(name) - used[name]) / passed_s for name in cluster.names}


def soak_rows(
    names: Sequence[str], before: Mapping[str, float], after: Mapping[str, float], memory: Sequence[RssRow]
) -> tuple[SoakRow, ...]:
    """Return a row for each member, from its first and its last reading."""
    rows = []
    for name in names:
        looks = [row.rss_mb for row in memory if row.member == name]
        idle = round(before[name], 5), round(after[name], 5)
        rows.append(SoakRow(name, *idle, looks[0], looks[-1]))
    return tuple(rows)


def soak_ratios(rows: Sequence[SoakRow]) -> dict[str, float]:
    """Return the cluster's larger idle share of a core, and the largest memory growth of a member."""
    return {
        "idle_core": round(
            max(sum(row.idle_core_before for row in rows), sum(row.idle_core_after for row in rows)), 5
        ),
        "memory_last_over_first": round(max(row.rss_mb_last / row.rss_mb_first for row in rows), 4),
    }
