"""Many requests on a simulated cluster: their bodies, the readings of memory, and the results."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from comparisons.soak import Bodies, RssRow, SoakOptions, measure_soak, soak_ratios, soak_rows
from convoy.bench.report.clock import Deadline
from convoy.errors import ConvoyError, StageLost

OPTIONS = SoakOptions(num_requests=100, first=10, concurrent=4, idle_s=0.0)
BODIES = Bodies("made up", 50, 2)


class MadeUp:
    """Grow by a megabyte with every request; beta does nothing."""

    names = ("alpha", "beta")

    def __init__(self, fail_at: int = -1) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.hung_up = 0
        self._fail_at = fail_at
        self._lock = threading.Lock()

    def ask(self, body: Mapping[str, Any]) -> Iterator[str]:
        with self._lock:
            self.asked.append(body)
        if body["seed"] == self._fail_at:
            raise StageLost("it is over")
        try:
            yield "one"
            yield "two"
        except GeneratorExit:
            self.hung_up += 1
            raise

    def cpu_s(self, name: str) -> float:
        return 0.0

    def rss_bytes(self, name: str) -> int:
        return 1_000_000 * (len(self.asked) if name == "alpha" else 1)


def test_every_request_is_asked_once_and_some_are_hung_up_on() -> None:
    cluster = MadeUp()
    found = measure_soak(cluster, BODIES, OPTIONS, deadline=Deadline(30), say=lambda _text: None)
    assert sorted(body["seed"] for body in cluster.asked) == list(range(100))
    assert cluster.hung_up == 10
    alpha, beta = found.members
    assert (alpha.rss_mb_first, alpha.rss_mb_last) == (10.0, 100.0)
    assert (beta.rss_mb_first, beta.rss_mb_last) == (1.0, 1.0)
    assert [row.requests for row in found.memory if row.member == "beta"] == list(range(10, 101, 10))


def test_a_request_that_fails_ends_the_bench() -> None:
    with pytest.raises(ConvoyError, match="it is over"):
        measure_soak(MadeUp(20), BODIES, OPTIONS, deadline=Deadline(30), say=lambda _text: None)


def test_idling_is_that_of_all_members_and_growth_that_of_the_worst() -> None:
    memory = [RssRow("alpha", 10, 100.0), RssRow("beta", 10, 50.0), RssRow("alpha", 90, 101.0)]
    memory.append(RssRow("beta", 90, 55.0))
    rows = soak_rows(
        ["alpha", "beta"], {"alpha": 0.002, "beta": 0.001}, {"alpha": 0.001, "beta": 0.001}, memory
    )
    assert soak_ratios(rows) == {"idle_core": 0.003, "memory_last_over_first": 1.1}


def test_memory_is_looked_at_first_and_last_and_between() -> None:
    stops = SoakOptions().stops
    assert (stops[0], stops[-1]) == (1_000, 10_000)
    assert len(stops) == 10
    assert SoakOptions(num_requests=5, first=5).stops == (5,)


def test_no_two_prompts_are_alike_and_every_run_has_the_same() -> None:
    prompts = [tuple(BODIES.of(number)["prompt"]) for number in range(200)]
    assert len(set(prompts)) == 200
    assert BODIES.of(3) == Bodies("made up", 50, 2).of(3)
