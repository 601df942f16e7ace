"""``convoy bench floor``: compare a decode step with the rate at which this machine reads memory."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb, counts
from convoy.cli.flags.steps import KvDtypeFlag, check_choice
from convoy.config.table import ENGINE

_MAX_CONCURRENT = 64


@bench_verb(max_seconds=600)
def floor(
    run: BenchRun,
    concurrent: Annotated[str, typer.Option(help="Counts of sequences that decode at once.")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps for each count.")] = 24,
    kv_dtype: KvDtypeFlag = None,
) -> None:
    """Compare a decode step with the memory's limit, and with masks.

    Also by shape of linears; --kernel takes several.
    """
    from convoy.bench.floor import FloorOptions, MemoryRead, floor_ratios, load_whole, measure_floor
    from convoy.bench.masks import mask_ratios, measure_masks
    from convoy.model.checkpoints.source import ModelSource
    from convoy.model.text.tokens import Tokenizer

    check_choice("engine", "kv_dtype", kv_dtype)
    held = kv_dtype or ENGINE.kv_dtype
    options = FloorOptions(counts("--concurrent", concurrent, _MAX_CONCURRENT), context, steps)
    run.check_context(options.max_tokens)
    source = ModelSource.resolve(run.named_model)
    read, rows, linears = MemoryRead(run.clock.deadline), [], []
    for kernel in run.kernel.split(","):
        run.say(f"loading {run.named_model} for {kernel}")
        stage = load_whole(source, kernel, run.threads, held)
        run.kernels.add(stage.options.kernel)
        found = measure_floor(stage, options, read, run.say)
        # Free the weights before the next kernel loads its own.
        del stage
        rows += found[0]
        linears += found[1]
    masks = measure_masks(Tokenizer(source), rows, options.steps, run.clock.deadline)
    settings: dict[str, int | str] = {"context": context, "steps": steps, "threads": run.threads or 0}
    settings["kv_dtype"] = held
    lines = {
        kernel: [(float(row.concurrent), row.step_ms) for row in rows if row.kernel == kernel]
        for kernel in run.kernels
    }
    ratios = floor_ratios(rows) | mask_ratios(masks)
    report = run.report("floor", settings, [*rows, *linears, *masks], ratios)
    run.show(report, ("decodes at once", "ms for a step"), lines)
