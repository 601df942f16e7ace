"""What a served cluster costs while nobody asks, and whether its memory grows over many requests.

bench/METHODOLOGY.md says what the figures mean and what they do not.
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
_DROPPED = 10  # one in so many requests is hung up on after its first piece
_NUM_SAMPLES = 10
_SHORT, _LONG, _ONE_LONG_IN = (4, 40), (41, 400), 8  # tokens of a prompt


class WatchedProcess(Protocol):
    """A served cluster whose processes can be looked at. ``names`` has the head first."""

    @property
    def names(self) -> Sequence[str]: ...

    def ask(self, body: Mapping[str, Any]) -> Iterator[str]:
        """The pieces of a streamed completion; leaving the iterator hangs up."""

    def cpu_s(self, name: str) -> float:
        """Seconds of a core that a member's process has used."""

    def rss_bytes(self, name: str) -> int:
        """Its resident memory."""


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """Memory is compared after ``first`` requests and after all. ``idle_s``: how long idling is watched."""

    num_requests: int = 10_000
    first: int = 1_000
    concurrent: int = 8
    max_tokens: int = 4
    idle_s: float = 30.0

    @property
    def stops(self) -> tuple[int, ...]:
        """After how many requests memory is looked at."""
        step = max(1, (self.num_requests - self.first) // (_NUM_SAMPLES - 1))
        between = range(self.first + step, self.num_requests, step)
        return tuple(dict.fromkeys((self.first, *between, self.num_requests)))


@dataclass(frozen=True, slots=True)
class SoakRow:
    """One member. ``idle_core``: the share of a core while nobody asked, before and after all requests."""

    member: str
    idle_core_before: float
    idle_core_after: float
    rss_mb_first: float
    rss_mb_last: float


@dataclass(frozen=True, slots=True)
class RssRow:
    """Resident memory of a member after so many requests; MB are 10^6 bytes."""

    member: str
    requests: int
    rss_mb: float


@dataclass(frozen=True, slots=True)
class Soaked:
    """All that a run found."""

    members: tuple[SoakRow, ...]
    memory: tuple[RssRow, ...]
    requests_per_s: float


def measure_soak(
    cluster: WatchedProcess, bodies: Bodies, options: SoakOptions, *, deadline: Deadline, say: Say
) -> Soaked:
    """Idle, then every request, then idle. Raises ConvoyError for a request that ends in an error."""
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
    """What is asked: short prompts and some long ones, no two alike; greedy and seeded in turn.

    The long ones make steps of every size, for which a stage makes room once.
    """

    def __init__(self, model_name: str, vocab_size: int, max_tokens: int) -> None:
        self._model_name = model_name
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens

    def of(self, number: int) -> dict[str, Any]:
        drawn = random.Random(number)  # noqa: S311 - not a secret
        length = drawn.randint(*(_LONG if number % _ONE_LONG_IN == 0 else _SHORT))
        return {
            "model": self._model_name,
            "prompt": [drawn.randrange(self._vocab_size) for _ in range(length)],
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
    """Each member's share of a core while nobody asks."""
    time.sleep(min(_SETTLE_S, idle_s, deadline.left_s()))  # what is measured is that time passes
    began_s = time.monotonic()
    used = {name: cluster.cpu_s(name) for name in cluster.names}
    time.sleep(min(idle_s, deadline.left_s()))
    passed_s = time.monotonic() - began_s
    return {name: (cluster.cpu_s(name) - used[name]) / passed_s for name in cluster.names}


def soak_rows(
    names: Sequence[str], before: Mapping[str, float], after: Mapping[str, float], memory: Sequence[RssRow]
) -> tuple[SoakRow, ...]:
    """A row for each member, from its first and its last look."""
    rows = []
    for name in names:
        looks = [row.rss_mb for row in memory if row.member == name]
        idle = round(before[name], 5), round(after[name], 5)
        rows.append(SoakRow(name, *idle, looks[0], looks[-1]))
    return tuple(rows)


def soak_ratios(rows: Sequence[SoakRow]) -> dict[str, float]:
    """Of the whole cluster: the larger idle share of a core; of the member that grew most: by how much."""
    return {
        "idle_core": round(
            max(sum(row.idle_core_before for row in rows), sum(row.idle_core_after for row in rows)), 5
        ),
        "memory_last_over_first": round(max(row.rss_mb_last / row.rss_mb_first for row in rows), 4),
    }
