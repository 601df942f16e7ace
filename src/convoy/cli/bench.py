"""``convoy bench``: measurements that others can repeat; bench/METHODOLOGY.md says how they are made."""

from __future__ import annotations

import typer

from convoy.cli import bench_fair, bench_hop, bench_recover, bench_soak, bench_spec, throughput

app = typer.Typer(rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure sealing, and what one and two members reach."""


app.command("solo")(throughput.solo)
app.command("loop")(throughput.loop)
app.command("batch")(throughput.batch)
app.command("prefill")(throughput.prefill)
app.command("fair")(bench_fair.fair)
app.command("hop")(bench_hop.hop)
app.command("comms")(bench_hop.comms)
app.command("recover")(bench_recover.recover)
app.command("spec")(bench_spec.spec)
app.command("soak")(bench_soak.soak)
