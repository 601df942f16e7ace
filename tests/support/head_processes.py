"""The processes of a running head: its own, and the front process that serves HTTP for it."""

from __future__ import annotations

import psutil

_FRONT = "convoy.cli.running.front"


def front_of(pid: int) -> psutil.Process | None:
    """Return the front process of the head ``pid``, or None if it serves HTTP itself."""
    return next((one for one in psutil.Process(pid).children() if _FRONT in one.cmdline()), None)


def head_processes(pid: int) -> list[psutil.Process]:
    """Return the process of the head ``pid``, and its front process if it has one."""
    front = front_of(pid)
    return [psutil.Process(pid), *([] if front is None else [front])]


def head_rss_bytes(pid: int) -> int:
    """Return the resident memory of the head ``pid`` and its front process."""
    return sum(one.memory_info().rss for one in head_processes(pid))
