"""``convoy bench``: measurements that others can repeat; bench/METHODOLOGY.md says how they are made."""

from __future__ import annotations

import typer

from convoy.cli import (
    bench_device,
    bench_fair,
    bench_fleet,
    bench_floor,
    bench_hop,
    bench_providers,
    bench_recover,
    bench_soak,
    bench_spec,
    bench_tp,
    throughput,
)

app = typer.Typer(rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure sealing, and what one and two members reach."""


for verb in (throughput.solo, throughput.loop, throughput.batch, throughput.prefill, bench_floor.floor):
    app.command()(verb)
for verb in (
    bench_fair.fair,
    bench_device.device,
    bench_hop.hop,
    bench_hop.comms,
    bench_recover.recover,
    bench_spec.spec,
    bench_soak.soak,
    bench_tp.tp,
):
    app.command()(verb)
app.command("fleet-sim")(bench_fleet.fleet_sim)
app.command()(bench_providers.providers)
