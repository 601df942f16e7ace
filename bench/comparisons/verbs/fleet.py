"""``bench/compare.py fleet-sim``: run the coordinator's own routing and queues over simulated providers."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb, counts

_MAX_PROVIDERS = 100_000
# For each provider. After so many requests, the speeds that providers report are measured ones.
_REQUESTS_EACH = 20


@bench_verb(model=None, max_seconds=1800)
def fleet_sim(
    run: BenchRun,
    providers: Annotated[str, typer.Option(help="Counts of providers.")] = "1000,10000",
    requests: Annotated[
        int, typer.Option(min=0, help=f"Requests of each run; 0: {_REQUESTS_EACH} for each provider.")
    ] = 0,
    accounts: Annotated[
        int, typer.Option(min=1, help="Number of accounts. A few of them send most requests.")
    ] = 200,
    load: Annotated[
        float, typer.Option(min=0.01, max=2, help="The requested share of what all providers can serve.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Random seed of lengths, arrivals and machines.")] = 1,
) -> None:
    """Simulate routing by the time to finish. The rivals are the least loaded provider, and a random one."""
    from comparisons.fleet.simulation import SimOptions, measure_fleet, policies, sim_ratios

    rows = []
    for count in counts("--providers", providers, _MAX_PROVIDERS):
        options = SimOptions(count, requests or _REQUESTS_EACH * count, accounts, load, seed)
        for policy in policies(seed):
            run.say(f"{count} providers, {options.num_requests} requests, {policy}")
            rows.append(measure_fleet(options, policy, run.clock.deadline))
    settings: dict[str, int | float | str | bool] = {"accounts": accounts, "load": load, "seed": seed}
    lines = {
        policy: [(float(row.providers), row.finish_p95_s) for row in rows if row.policy == policy]
        for policy in policies(seed)
    }
    run.show(
        run.report("fleet-sim", settings, rows, sim_ratios(rows)), ("providers", "p95 s to finish"), lines
    )
