from __future__ import annotations

import math

import pytest

from comparisons.fleet.provider import SimulatedProvider, SimulatedWork
from comparisons.fleet.simulation import (
    FIRST_TO_FINISH,
    SimOptions,
    SimRow,
    machines,
    measure_fleet,
    sim_ratios,
)
from convoy.bench.report.clock import Deadline
from convoy.errors import ConvoyError
from convoy.fleet.capacity import Capacity
from convoy.fleet.coordinator.routing.route_request import RouteRequest


@pytest.fixture(scope="module")
def rows() -> dict[str, SimRow]:
    options = SimOptions(num_providers=60, num_requests=3000, num_accounts=40, load=1.1)
    names = (FIRST_TO_FINISH, "least loaded", "random")
    return {name: measure_fleet(options, name, Deadline(60)) for name in names}


def test_every_request_is_served_and_no_account_starves_under_more_than_can_be_served(
    rows: dict[str, SimRow],
) -> None:
    for row in rows.values():
        assert (row.served, row.refused, row.unserved_accounts) == (3000, 0, 0)


def test_the_first_to_finish_beats_the_least_loaded_and_a_random_one(rows: dict[str, SimRow]) -> None:
    ratios = sim_ratios(list(rows.values()))
    assert len(ratios) == 2
    assert all(ratio > 1.0 for ratio in ratios.values()), ratios


def test_the_same_seed_gives_the_same_times() -> None:
    options = SimOptions(num_providers=20, num_requests=300, num_accounts=5)
    one, two = (measure_fleet(options, FIRST_TO_FINISH, Deadline(60)) for _ in range(2))
    assert (one.finish_mean_s, one.first_p95_s) == (two.finish_mean_s, two.first_p95_s)


def test_a_simulation_that_takes_too_long_says_so() -> None:
    with pytest.raises(ConvoyError, match="longer than"):
        measure_fleet(SimOptions(num_providers=50, num_requests=3000), FIRST_TO_FINISH, Deadline(1e-9))


def test_shares_of_machines_are_of_a_hundred() -> None:
    kinds = machines()
    assert sum(share for share, _ in kinds) == 100
    for _, capacity in kinds:
        capacity.check()


def test_a_simulated_provider_takes_as_long_as_its_rates_say() -> None:
    capacity = Capacity(slots=2, decode_rate=10, batch_rate=16, prefill_rate=100, max_context=4096)
    provider = SimulatedProvider("p", capacity)
    work = [
        SimulatedWork(RouteRequest(number, "a", "m", 50, 100, 0.0, math.inf), 11, 0.0) for number in (0, 1)
    ]
    for one in work:
        provider.start(one, 0.0)
    assert provider.next_s() == pytest.approx(0.5)
    assert provider.step(0.5)[0] == [work[0]]
    assert provider.step(1.0)[0] == [work[1]]  # five of the first one's ten tokens are out, alone
    # at an eighth of a second for each of two
    assert provider.next_s() == pytest.approx(1.0 + 5 * 0.125)
    begun, over = provider.step(1.625)
    assert (begun, over) == ([], [work[0]])
    assert provider.next_s() == pytest.approx(1.625 + 5 * 0.1)
