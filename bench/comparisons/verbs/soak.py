"""``bench/compare.py soak``: the load of an idle cluster of processes, and its memory over many requests."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb
from convoy.cli.local.served_cluster import ServedCluster, ServedOptions
from convoy.sdk.local_cluster import LocalOptions

# Few, so that every block has been used before memory is first measured.
_NUM_BLOCKS = 256


@bench_verb(model="demo-mini", max_seconds=3600)
def soak(
    run: BenchRun,
    members: Annotated[int, typer.Option(min=1, help="Processes; the first is the head.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 10_000,
    first: Annotated[int, typer.Option(min=1, help="Requests before memory is first measured.")] = 1_000,
    concurrent: Annotated[int, typer.Option(min=1, max=64, help="Concurrent clients.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 4,
    idle: Annotated[float, typer.Option(min=0.1, help="Seconds to watch the idle cluster.")] = 30.0,
) -> None:
    """Measure cores and memory of head and peers, idle and busy. Busy means many requests over HTTP."""
    from comparisons.soak import Bodies, SoakOptions, measure_soak, soak_ratios
    from convoy.model.checkpoints.source import ModelSource

    options = SoakOptions(max(requests, first), first, concurrent, tokens, idle)
    source = ModelSource.resolve(run.named_model)
    bodies = Bodies(source.name, source.spec.vocab_size, tokens)
    limits = {"num_blocks": _NUM_BLOCKS, "max_batch": max(8, concurrent)}
    alike = {"parallel": "pipeline"}
    local = LocalOptions(members, None, run.kernel, run.threads or 1, engine=limits, sharing=alike)
    deadline = run.clock.deadline
    with ServedCluster(ServedOptions(run.named_model, local)) as cluster:
        run.kernels.add(str(cluster.status()["kernel"]))
        found = measure_soak(cluster, bodies, options, deadline=deadline, say=run.say)
    settings: dict[str, int | float | str | bool] = {
        "members": members,
        "requests": options.num_requests,
        "first": first,
        "concurrent": concurrent,
        "tokens": tokens,
        "idle_s": idle,
        "requests_per_s": found.requests_per_s,
    }
    lines = {
        row.member: [
            (float(look.requests), look.rss_mb) for look in found.memory if look.member == row.member
        ]
        for row in found.members
    }
    rows = [*found.members, *found.memory]
    report = run.report("soak", settings, rows, soak_ratios(found.members))
    run.show(report, ("requests", "MB resident"), lines)
