"""``convoy bench device``: decode batches on one device, and over sealed links of members on several."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb, counts

if TYPE_CHECKING:
    from convoy.bench.device_ring import RingRow

_WINDOWS, _WINDOW_TOKENS = 3, 24
_MAX_BATCH = 256

DevicesFlag = Annotated[str, typer.Option(help="A device for each member, separated by commas.")]
LayersFlag = Annotated[list[str] | None, typer.Option(help="Spans of these members, as for `convoy run`.")]


@bench_verb(model="synthetic:llama-3-8b", max_seconds=900)
def device(
    run: BenchRun,
    devices: DevicesFlag = "cuda:0,cuda:1",
    layers: LayersFlag = None,
    batch: Annotated[int, typer.Option(min=1, max=_MAX_BATCH, help="Requests of a micro-batch.")] = 64,
    micro_batches: Annotated[
        str, typer.Option(help="Numbers of micro-batches, over several members.")
    ] = "2,3,4",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    local: Annotated[
        bool, typer.Option(help="Also measure all devices in one member, without a link.")
    ] = True,
) -> None:
    """Measure decode steps by hand and through the engine. On one device, then on all, each in a member."""
    names = devices.split(",")
    sizes = counts("--micro-batches", micro_batches, _MAX_BATCH // batch)
    one = replace(run, device=names[0])
    every = replace(run, device=devices, layers=layers)
    rows = [*_ring(one, 1, batch, (1,), context), _engine(one, 1, batch, 1, context)]
    rows += _ring(every, len(names), batch, sizes, context)
    rows.append(_engine(every, len(names), batch, sizes[-1], context))
    if local:
        rows += _ring(every, 1, batch, sizes, context)
    run.kernels.update(one.kernels, every.kernels)
    alone, engine_alone = rows[0].tokens_per_s, rows[1].tokens_per_s
    ratios = {
        f"{row.through}_{len(row.stages)}_members_{row.micro_batches}_micro_batches": round(
            row.tokens_per_s / (engine_alone if row.through == "engine" else alone), 3
        )
        for row in rows[2:]
    }
    settings: dict[str, int | float | str | bool] = {"devices": devices, "batch": batch, "context": context}
    settings["layers"] = ", ".join(layers or [])
    lines = {"ring": [(float(row.micro_batches), row.tokens_per_s) for row in rows if row.through == "ring"]}
    run.show(run.report("device", settings, rows, ratios), ("micro-batches", "tokens/s"), lines)


def _limits(batch: int, micro_batches: int, num_blocks: int) -> dict[str, int]:
    return {
        "max_batch": batch * micro_batches,
        "micro_batches": micro_batches,
        "prefill_chunk": 2048,
        "max_step_tokens": 2048,
        "num_blocks": num_blocks,
    }


def _ring(run: BenchRun, members: int, batch: int, sizes: tuple[int, ...], context: int) -> list[RingRow]:
    """Return the rows of the executor alone, without a scheduler."""
    from convoy.bench.bare import BLOCK_SIZE
    from convoy.bench.device_ring import RingDecode, RingRow, room_tokens
    from convoy.model.checkpoints.source import ModelSource

    room = room_tokens(context, _WINDOWS, _WINDOW_TOKENS)
    num_blocks = batch * sizes[-1] * (-(-room // BLOCK_SIZE))
    rows = []
    with run.head(members, _limits(batch, sizes[-1], num_blocks)) as (head, _):
        assert head.executor is not None
        stages = [(stage.member, stage.device) for stage in head.stages()]
        vocab_size = ModelSource.resolve(run.named_model).spec.vocab_size
        decode = RingDecode(head.executor, vocab_size, run.clock.deadline)
        for size in sizes:
            rate, ms = decode.measure(batch, size, context, _WINDOWS, _WINDOW_TOKENS)
            run.say(f"ring of {members}: {size} micro-batches of {batch} decode {rate:.0f} tokens/s")
            rows.append(RingRow("ring", stages, batch, size, context, round(ms, 3), round(rate, 1)))
    return rows


def _engine(run: BenchRun, members: int, batch: int, micro_batches: int, context: int) -> RingRow:
    """Return the row of requests through the engine, while clients read the outputs."""
    from convoy.bench.device_ring import RingRow
    from convoy.bench.throughput import DecodeOptions, measure_decode

    count = batch * micro_batches
    options = DecodeOptions((count,), context, _WINDOWS, _WINDOW_TOKENS, prefill_chunk=2048)
    with run.cluster(members, _limits(batch, micro_batches, options.num_blocks)) as cluster:
        stages = [(stage.member, stage.device) for stage in cluster.status().stages]
        vocab_size, deadline = cluster.tokenizer.vocab_size, run.clock.deadline
        (row,) = measure_decode(cluster.engine, vocab_size, members, options, deadline=deadline, say=run.say)
    ms = 1000 * batch / row.tokens_per_s
    return RingRow("engine", stages, batch, micro_batches, context, round(ms, 3), round(row.tokens_per_s, 1))
