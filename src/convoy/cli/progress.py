"""Progress on standard error: one bar per member while weights load, nothing where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoy.cluster.head import LoadProgress


@contextmanager
def loading_bars(*, quiet: bool) -> Iterator[LoadProgress | None]:
    """Hands out a callback (member, loaded, total bytes), or None where standard error is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bars = Progress(
        TextColumn("loading {task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, object] = {}

    def on_load(member: str, loaded: int, total: int) -> None:
        if member not in tasks:
            tasks[member] = bars.add_task(member, total=total)
        bars.update(tasks[member], completed=loaded, total=total)  # type: ignore[arg-type]

    with bars:
        yield on_load
