"""``convoy bench``: measurements that users repeat; bench/METHODOLOGY.md says how they are made.

The comparisons that only developers run are beside it, in bench/compare.py.
"""

from __future__ import annotations

import typer

from convoy.cli.benches import device as bench_device
from convoy.cli.benches import floor as bench_floor
from convoy.cli.benches import formats as bench_formats
from convoy.cli.benches import hop as bench_hop
from convoy.cli.benches import planned as bench_planned
from convoy.cli.benches import recover as bench_recover
from convoy.cli.benches import spec as bench_spec
from convoy.cli.benches import throughput
from convoy.cli.benches import tp as bench_tp

app = typer.Typer(rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure sealing, and the speed of one and of two members."""


for verb in (throughput.solo, throughput.loop, throughput.batch, throughput.prefill, bench_floor.floor):
    app.command()(verb)
for verb in (
    bench_formats.formats,
    bench_planned.plan,
    bench_device.device,
    bench_hop.hop,
    bench_hop.comms,
    bench_recover.recover,
    bench_spec.spec,
    bench_tp.tp,
):
    app.command()(verb)
