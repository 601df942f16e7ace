"""Pin members of one machine to cores of their own. Only then do figures hold for two machines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from convoy.errors import UsageError
from convoy.sdk.local_cluster import Cores

PinFlag = Annotated[bool, typer.Option("--pin", help="Pin each member to cores of its own (Linux).")]


def share_cores(num_members: int) -> tuple[Cores, ...]:
    """Share out the cores that this process may use evenly. A remainder stays idle.

    Raises UsageError if a process cannot be pinned, and if there are fewer cores than members.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(
            "--pin: this system does not let a process choose its cores",
            hint="leave --pin out, and take the figures for those of one shared machine",
        )
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // max(1, num_members)
    if not each:
        raise UsageError(
            f"--pin: {num_members} members need a core each, and this process may use {len(cores)}",
            hint="ask for fewer members, or leave --pin out",
        )
    return tuple(tuple(cores[i * each : (i + 1) * each]) for i in range(num_members))


@contextmanager
def pinned(cores: Cores | None) -> Iterator[None]:
    """Pin this thread, and those that it starts in the block, to ``cores``. None changes nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
