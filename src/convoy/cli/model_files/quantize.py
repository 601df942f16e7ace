"""``convoy quantize``: write a checkpoint of a model with 4-bit or 8-bit weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.running.hub import local_model
from convoy.cli.show.output import JsonFlag, format_bytes, print_fields, print_json, print_table
from convoy.cli.show.progress import loading_bars
from convoy.config.kernels import QuantizeFormat
from convoy.config.settings import load_config

if TYPE_CHECKING:
    from convoy.model.quantize.checkpoint import Quantized


def quantize(
    model: Annotated[str, typer.Argument(help="A directory, a GGUF file, org/name of the hub, or demo.")],
    form: Annotated[
        QuantizeFormat, typer.Option("--format", help="q4: 4 bits, and a scale for 32 weights; q8: 8 bits.")
    ],
    out: Annotated[Path, typer.Option(help="The new checkpoint's folder. It is missing or empty.")],
    config: Annotated[Path | None, typer.Option(help="A convoy.toml, for [model] cache and hub.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint with 4-bit or 8-bit weights.

    Its layout is that of compressed-tensors. Scales are chosen by a search over weighted error, which the
    folder's convoy_quantize.json holds.
    """
    from convoy.model.checkpoints.source import ModelSource
    from convoy.model.quantize.checkpoint import quantize as run
    from convoy.model.quantize.checkpoint import require_unused

    # A wrong folder is refused before a model is downloaded.
    require_unused(out)
    source = ModelSource.resolve(local_model(load_config(config), model, quiet=as_json))
    with loading_bars(quiet=as_json, action="quantizing") as on_load:

        def progress(done: int, total: int) -> None:
            if on_load is not None:
                on_load(source.name, done, total)

        made = run(source, form, out, progress)
    _print(made, as_json=as_json)


def _print(made: Quantized, *, as_json: bool) -> None:
    record = made.record
    if as_json:
        print_json({"folder": made.folder, "record": record, "duration_s": made.duration_s})
        return
    print_fields(
        {
            "model": record.model,
            "folder": made.folder,
            "format": f"{record.format}, a scale for {record.group_size} weights",
            "size": f"{format_bytes(record.bytes_before)} -> {format_bytes(record.bytes_after)}",
            "duration": f"{made.duration_s:.1f} s",
        }.items()
    )
    rows: list[tuple[object, ...]] = [
        (kind, one.matrices, one.bits, _share(one.error), _share(one.nearest_error))
        for kind, one in record.kinds.items()
    ]
    total = sum(one.matrices for one in record.kinds.values())
    rows.append(("all", total, None, _share(record.error), _share(record.nearest_error)))
    print_table(("matrices", "number", "bits", "weighted error", "rounded to nearest"), rows)


def _share(error: float) -> str:
    return f"{100 * error:.3f} %"
