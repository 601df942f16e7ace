"""Progress on standard error: a bar for each member on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from convoy.cli.show.output import print_note

if TYPE_CHECKING:
    from convoy.cluster.head.head import LoadProgress
    from convoy.wire.messages.control import Progress as StartProgress


# What a member does in a phase of its start, by `Progress.stage`.
STARTING = {"import": "loads PyTorch", "examine": "examines its kernels"}
_LINE_EVERY_S = 5.0
_FIRST_LINE_S = 1.0


class LoadLines:
    """Print how far every member has loaded, on one line, at most every 5 s."""

    def __init__(self, now: Callable[[], float] = time.monotonic, action: str = "loading") -> None:
        self._now = now
        self._action = action
        self._said_s = now()
        self._parts: dict[str, str] = {}

    def on_load(self, member: str, loaded: int, total: int) -> None:
        self._parts[member] = f"{member} {loaded / max(1, total):.0%}"
        if self._now() - self._said_s >= _LINE_EVERY_S:
            self._said_s = self._now()
            print_note(f"{self._action}: {', '.join(self._parts.values())}")


class StartLines:
    """Print what a member that is here still does before it can take layers: at once, then every 5 s."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._said: dict[str, tuple[str, float]] = {}

    def on_start(self, member: str, progress: StartProgress) -> None:
        now_s, (phase, said_s) = self._now(), self._said.get(member, ("", 0.0))
        if progress.stage in STARTING and (phase != progress.stage or now_s - said_s >= _LINE_EVERY_S):
            self._said[member] = progress.stage, now_s
            print_note(f"{member} {STARTING[progress.stage]}: {progress.loaded_bytes} s so far")


@contextmanager
def said_if_slow(text: str, *, quiet: bool = False, after_s: float = _FIRST_LINE_S) -> Iterator[None]:
    """Print ``text`` if the block takes longer than ``after_s``. Nothing is printed if ``quiet``."""
    timer = threading.Timer(after_s, print_note, (text,))
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Takes the number of things that are done, the number of all, and the thing that comes next.
CountProgress = Callable[[int, int, str], None]


class CountLines:
    """Print how many things are done and which comes next: after a second, and then at most every 5 s."""

    def __init__(self, action: str, now: Callable[[], float] = time.monotonic) -> None:
        self._action = action
        self._now = now
        self._next_s = now() + _FIRST_LINE_S

    def on_progress(self, done: int, total: int, what: str) -> None:
        now_s = self._now()
        if now_s >= self._next_s:
            self._next_s = now_s + _LINE_EVERY_S
            print_note(f"{self._action}: {done}/{total}, {what}")


class VerifyLines:
    """Print how many layouts or tokens are done: at once for the first, then at most every 5 s."""

    def __init__(self, unit: str, now: Callable[[], float] = time.monotonic) -> None:
        self._unit = unit
        self._now = now
        self._next_s = now()

    def on_progress(self, done: int, total: int, what: str) -> None:
        if what and self._now() >= self._next_s:
            self._next_s = self._now() + _LINE_EVERY_S
            print_note(f"verifying: {done}/{total} {self._unit}, {what}")


@contextmanager
def loading_bars(*, quiet: bool, action: str = "loading") -> Iterator[LoadProgress | None]:
    """Yield a callback (member, loaded bytes, total bytes), or None if ``quiet``.

    ``action`` is the first word of each line.
    """
    if quiet or not sys.stderr.isatty():
        yield None if quiet else LoadLines(action=action).on_load
        return
    # Only a terminal pays for the import of rich.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bars = Progress(
        TextColumn(f"{action} {{task.description}}"),
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


@contextmanager
def counting_bar(action: str, *, quiet: bool) -> Iterator[CountProgress]:
    """Yield a callback (number done, number of all, the next one). It shows nothing if ``quiet``."""
    if quiet or not sys.stderr.isatty():
        yield (lambda *_: None) if quiet else CountLines(action).on_progress
        return
    # Only a terminal pays for the import of rich.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn(action),
        BarColumn(),
        MofNCompleteColumn(),
        # A model's name is no markup.
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
