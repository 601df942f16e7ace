"""Simulate thousands of providers under the coordinator's own dispatcher, on a simulated clock.

The provider table, the routing and the queues are those of `convoy coordinator`. The simulated part is the
time that a provider takes, from measured rates (`fleet/machines.toml`), and the arrival of requests.
"""

from __future__ import annotations

import heapq
import math
import random
import time
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from comparisons.fleet.provider import SimulatedProvider, SimulatedWork
from convoy.bench.report.clock import Deadline
from convoy.bench.report.percentile import percentile
from convoy.errors import QueueFull
from convoy.fleet.capacity import Capacity
from convoy.fleet.coordinator.routing.dispatch import Assignment, Dispatcher, QueueLimits
from convoy.fleet.coordinator.routing.policy import FirstToFinish, RoutingPolicy
from convoy.fleet.coordinator.routing.providers import ProviderTable
from convoy.fleet.coordinator.routing.route_request import RouteRequest
from convoy.trust.evidence.level import Level

MODEL = "simulated"
FIRST_TO_FINISH = "first to finish"
_HEARTBEAT_S = 5.0
# Of a hundred providers five take three times as long as they claim.
_SLOW_SHARE, _SLOW = 0.05, 3.0
# One in a hundred refuses every request.
_REFUSING_SHARE = 0.01
_CONTEXT = 32_768
# Events between two checks of the deadline.
_LOOK_EVERY = 4096


class AtRandom:
    """Choose any free provider at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation

    def choose(
        self,
        providers: ProviderTable,
        ask: RouteRequest,
        output_tokens: float,  # noqa: ARG002 - it does not look
        now_s: float,
    ) -> str | None:
        """Choose a provider, as `RoutingPolicy` describes."""
        found = np.flatnonzero(providers.allowed(ask, now_s))
        return providers.name(int(self._random.choice(found))) if len(found) else None


class LeastLoaded:
    """Choose the provider with the fewest requests."""

    def choose(
        self,
        providers: ProviderTable,
        ask: RouteRequest,
        output_tokens: float,  # noqa: ARG002 - it does not look
        now_s: float,
    ) -> str | None:
        """Choose a provider, as `RoutingPolicy` describes."""
        found = np.flatnonzero(providers.allowed(ask, now_s))
        if not len(found):
            return None
        return providers.name(int(found[providers.column("running")[found].argmin()]))


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Hold the options.

    ``load`` is the requested share of the work that all providers together could serve.
    """

    num_providers: int = 1000
    num_requests: int = 50_000
    num_accounts: int = 200
    load: float = 0.8
    seed: int = 1


@dataclass(frozen=True, slots=True)
class SimRow:
    """Hold the results of one policy. Times are in seconds, but those of the decision in microseconds."""

    policy: str
    providers: int
    requests: int
    served: int
    # Told to come again later.
    refused: int
    # Failed at a provider before another one served them.
    retried: int
    decide_p50_us: float
    decide_p95_us: float
    decide_p99_us: float
    wait_p95_s: float
    wait_max_s: float
    first_p50_s: float
    first_p95_s: float
    finish_mean_s: float
    finish_p95_s: float
    # Of the accounts that asked for anything.
    unserved_accounts: int


def machines() -> list[tuple[float, Capacity]]:
    """Return the kinds of machines with their shares."""
    text = Path(__file__).with_name("machines.toml").read_text("utf-8")
    return [
        (
            one["share"],
            Capacity(one["slots"], one["decode_rate"], one["batch_rate"], one["prefill_rate"], _CONTEXT),
        )
        for one in tomllib.loads(text)["machine"]
    ]


def policies(seed: int) -> dict[str, RoutingPolicy]:
    """Return the policies to compare, by name."""
    return {FIRST_TO_FINISH: FirstToFinish(), "least loaded": LeastLoaded(), "random": AtRandom(seed)}


@dataclass(slots=True)
class SimulationCounts:
    """Hold a run's observations, a number for each request."""

    decide_us: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    asked: set[str] = field(default_factory=set)
    refused: int = 0
    retried: int = 0


class FleetSimulation:
    """Simulate one run of one policy: the same requests and providers for the same options."""

    def __init__(self, options: SimOptions, policy: RoutingPolicy) -> None:
        self._options = options
        self._random = random.Random(options.seed)  # noqa: S311 - a simulation
        self._dispatcher = Dispatcher(QueueLimits(1_000_000, 1_000_000, 3600.0), policy)
        self._providers = self._make_providers()
        self._events: list[tuple[float, int, str, object]] = []
        self._count = 0
        self._counts = SimulationCounts()
        self._outputs: dict[int, int] = {}
        self._now_s = 0.0

    def run(self, deadline: Deadline) -> SimulationCounts:
        """Run all requests to the end. Raises ConvoyError at the deadline."""
        for provider in self._providers.values():
            self._dispatcher.join(provider.name, {MODEL: provider.capacity}, Level.NONE, 0.0)
            self._at(self._random.uniform(0, _HEARTBEAT_S), "heartbeat", provider)
        self._schedule_requests()
        while self._events and self._over < self._options.num_requests:
            self._now_s, _, kind, what = heapq.heappop(self._events)
            self._handle(kind, what)
            if not self._count % _LOOK_EVERY:
                deadline.left_s()
        return self._counts

    @property
    def _over(self) -> int:
        return len(self._counts.finish_s) + self._counts.refused

    def _make_providers(self) -> dict[str, SimulatedProvider]:
        shares, kinds = zip(*machines(), strict=True)
        made = {}
        for number in range(self._options.num_providers):
            capacity = self._random.choices(kinds, shares)[0]
            factor = _SLOW if self._random.random() < _SLOW_SHARE else self._random.uniform(0.9, 1.1)
            refuses = self._random.random() < _REFUSING_SHARE
            name = f"p{number}"
            made[name] = SimulatedProvider(name, capacity, factor, refuses)
        return made

    def _schedule_requests(self) -> None:
        """Schedule all requests: Poisson arrivals, log-normal lengths, most requests from a few accounts."""
        options, rand = self._options, self._random
        weights = [1 / (rank + 1) for rank in range(options.num_accounts)]
        accounts = rand.choices(range(options.num_accounts), weights, k=options.num_requests)
        prompts = [min(8000, max(8, int(rand.lognormvariate(5.5, 1.0)))) for _ in accounts]
        outputs = [min(1024, max(2, int(rand.lognormvariate(4.6, 0.8)))) for _ in accounts]
        providers = self._dispatcher.providers(MODEL)
        assert providers is not None
        mean = [sum(values) / len(values) for values in (prompts, outputs)]
        rate = options.load * providers.served_per_s(*mean)
        at_s = 0.0
        for number, (account, prompt, output) in enumerate(zip(accounts, prompts, outputs, strict=True)):
            at_s += rand.expovariate(rate)
            ask = RouteRequest(number, f"a{account}", MODEL, prompt, 1024, at_s, math.inf)
            self._outputs[number] = output
            self._at(at_s, "request", ask)

    def _at(self, when_s: float, kind: str, what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, kind, what))

    def _handle(self, kind: str, what: object) -> None:
        match what:
            case RouteRequest() as ask:
                self._submit(ask)
            case SimulatedProvider() as provider if kind == "heartbeat":
                self._place(self._dispatcher.note_load(provider.name, {MODEL: provider.load()}, self._now_s))
                self._at(self._now_s + _HEARTBEAT_S, "heartbeat", provider)
            case (SimulatedProvider() as provider, int() as version) if version == provider.version:
                self._step(provider)
            case (SimulatedProvider(), Assignment() as assignment):
                self._refused(assignment)
            case "tick":
                self._place(self._dispatcher.tick(self._now_s)[1])
            case _:
                # An outdated event: the provider has computed its next step anew since then.
                pass

    def _submit(self, ask: RouteRequest) -> None:
        self._counts.asked.add(ask.account)
        began = time.perf_counter()
        try:
            assignment = self._dispatcher.submit(ask, self._now_s)
        except QueueFull:
            self._counts.refused += 1
            return
        self._counts.decide_us.append(1e6 * (time.perf_counter() - began))
        self._place([assignment] if assignment is not None else [])

    def _place(self, assignments: list[Assignment]) -> None:
        for assignment in assignments:
            provider = self._providers[assignment.provider]
            if provider.refuses:
                self._at(self._now_s + 0.01, "refuse", (provider, assignment))
                continue
            ask = assignment.ask
            provider.start(SimulatedWork(ask, self._outputs[ask.number], self._now_s), self._now_s)
            self._wait_for(provider)

    def _wait_for(self, provider: SimulatedProvider) -> None:
        provider.version += 1
        if (next_s := provider.next_s()) is not None:
            self._at(max(self._now_s, next_s), "step", (provider, provider.version))

    def _step(self, provider: SimulatedProvider) -> None:
        begun, over = provider.step(self._now_s)
        for work in begun:
            self._dispatcher.first_token(work.ask.number)
        for work in over:
            self._finish(work)
        self._wait_for(provider)

    def _finish(self, work: SimulatedWork) -> None:
        counts, ask = self._counts, work.ask
        counts.wait_s.append(work.began_s - ask.arrived_s)
        counts.first_s.append(work.first_s - ask.arrived_s)
        counts.finish_s.append(self._now_s - ask.arrived_s)
        counts.served[ask.account] += 1
        freed = self._dispatcher.finished(
            *(ask.number, self._now_s),
            first_s=work.first_s - work.began_s,
            output_tokens=work.output_tokens,
            decode_s=self._now_s - work.first_s,
        )
        self._place(freed)

    def _refused(self, assignment: Assignment) -> None:
        self._counts.retried += 1
        ask, freed = self._dispatcher.failed(assignment.ask.number, self._now_s)
        assert ask is not None, "an assigned request is under way"
        again = self._dispatcher.again(ask, self._now_s)
        self._place([*([again] if again is not None else []), *freed])
        if (next_s := self._dispatcher.next_tick_s(self._now_s)) is not None and math.isfinite(next_s):
            self._at(next_s, "tick", "tick")


def measure_fleet(options: SimOptions, policy: str, deadline: Deadline) -> SimRow:
    """Simulate ``policy``, one of `policies`. Raises ConvoyError at the deadline."""
    counts = FleetSimulation(options, policies(options.seed)[policy]).run(deadline)

    def at(values: list[float], percent: float, digits: int = 3) -> float:
        return round(percentile(values, percent), digits)

    return SimRow(
        policy=policy,
        providers=options.num_providers,
        requests=options.num_requests,
        served=len(counts.finish_s),
        refused=counts.refused,
        retried=counts.retried,
        decide_p50_us=at(counts.decide_us, 50, 1),
        decide_p95_us=at(counts.decide_us, 95, 1),
        decide_p99_us=at(counts.decide_us, 99, 1),
        wait_p95_s=at(counts.wait_s, 95),
        wait_max_s=at(counts.wait_s, 100),
        first_p50_s=at(counts.first_s, 50),
        first_p95_s=at(counts.first_s, 95),
        finish_mean_s=round(sum(counts.finish_s) / len(counts.finish_s), 3),
        finish_p95_s=at(counts.finish_s, 95),
        unserved_accounts=len(counts.asked - counts.served.keys()),
    )


def sim_ratios(rows: list[SimRow]) -> dict[str, float]:
    """Return the mean time to finish of each policy over that of `FirstToFinish`, by number of providers."""
    ours = {row.providers: row.finish_mean_s for row in rows if row.policy == FIRST_TO_FINISH}
    return {
        f"{row.policy}_over_{FIRST_TO_FINISH}_{row.providers}".replace(" ", "_"): round(
            row.finish_mean_s / ours[row.providers], 2
        )
        for row in rows
        if row.policy != FIRST_TO_FINISH
    }
