"""``bench/compare.py fit``: a large model on members with little memory, and what their processes take."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb
from convoy.cli.local.served_cluster import ServedCluster, ServedOptions
from convoy.config.temporary_folder import temporary_folder
from convoy.sdk.local_cluster import LocalOptions

_MEMORY = re.compile(r"^(VmHWM|RssAnon):\s+([0-9]+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FitRow:
    """Hold one member's memory: what it may plan with, its weights, and what its process takes.

    ``anonymous_bytes`` are resident at the end. ``peak_bytes`` is the greatest resident size, which includes
    pages of files that the system may drop.
    """

    member: str
    layers: str
    offered_bytes: int
    weight_bytes: int
    anonymous_bytes: int
    peak_bytes: int


@bench_verb(model="synthetic:llama-3-8b", max_seconds=3600)
def fit(
    run: BenchRun,
    form: Annotated[
        str, typer.Option(help="The form of the weights, as in `convoy bench formats`.")
    ] = "mlx-4",
    members: Annotated[int, typer.Option(min=1, max=8, help="Processes; the first is the head.")] = 2,
    memory_gb: Annotated[float, typer.Option(min=0.1, help="Memory that each member may plan with.")] = 3.0,
    context: Annotated[int, typer.Option(min=16, help="Tokens of the prompt and its answer.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 8,
    files: Annotated[Path | None, typer.Option(help="A folder with the files of an earlier run.")] = None,
) -> None:
    """Serve a model of random codes on members with little memory, and ask it over HTTP.

    The members are `convoy serve` and `convoy join`, over sealed links.
    """
    from convoy.bench.forms.files import write_form
    from convoy.model.checkpoints.source import ModelSource

    run.check_context(context)
    with temporary_folder() as folder:
        path = files
        if path is None:
            run.say(f"writing {run.named_model} as {form}")
            path = write_form(ModelSource.resolve(run.named_model), form, folder)
        local = LocalOptions(members, None, run.kernel, run.threads, memory_gb=memory_gb)
        started_s = time.monotonic()
        with ServedCluster(ServedOptions(str(path), local, run.clock.deadline.left_s())) as cluster:
            ready_s = time.monotonic() - started_s
            run.say(f"ready after {ready_s:.1f} s")
            rows, answer_s = _ask(cluster, context, tokens, memory_gb)
            run.kernels.add(str(cluster.status()["kernel"]))
    settings: dict[str, int | float | str | bool] = {"form": form, "context": context, "tokens": tokens}
    ratios = {"ready_s": round(ready_s, 1), "answer_s": round(answer_s, 2)}
    report = run.report("fit", settings, rows, ratios)
    lines = {name: [(1.0, row.anonymous_bytes / 1e9)] for name, row in ((row.member, row) for row in rows)}
    run.show(report, ("member", "GB"), lines)


def _ask(cluster: ServedCluster, context: int, tokens: int, memory_gb: float) -> tuple[list[FitRow], float]:
    """Return each member's memory behind an answer, and the seconds of the answer."""
    # One token for each byte.
    prompt = "Convoy " * context
    body = {"model": cluster.status()["model"], "prompt": prompt[: context - tokens], "max_tokens": tokens}
    started_s = time.monotonic()
    assert list(cluster.ask({**body, "temperature": 0, "ignore_eos": True})), "the answer has no text"
    answer_s = time.monotonic() - started_s
    rows = []
    for stage in cluster.status()["stages"]:
        name = str(stage["member"])
        text = Path(f"/proc/{cluster.process(name).pid}/status").read_text(encoding="ascii")
        found = {key: 1024 * int(number) for key, number in _MEMORY.findall(text)}
        span = f"{stage['start']}:{stage['end'] - 1}" + (",output" if stage["output"] else "")
        weights = int(stage["weight_bytes"])
        rows.append(FitRow(name, span, round(1e9 * memory_gb), weights, found["RssAnon"], found["VmHWM"]))
    return rows, answer_s
