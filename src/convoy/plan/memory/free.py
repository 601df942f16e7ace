"""Find the memory that a process may still take here.

The machine's free memory does not show a container's limit, or a limit of the process. The system ends a
process that takes more, or refuses its allocation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_ROOT = Path("/")
# Of each version: the files of the limit and of the use, and the key of cached pages in its statistics.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_bytes(num_processes: int = 1, root: Path = _ROOT) -> int:
    """Return the bytes that each of ``num_processes`` equal processes of this machine may still take.

    They share the free memory of the machine and of their control groups. Each has this process's limits.
    ``root`` is the folder in which the system's files are.
    """
    shared = [int(psutil.virtual_memory().available), *(free for _, free in _groups(root))]
    return max(0, min([min(shared) // num_processes, *_own_rooms()]))


def total_bytes(root: Path = _ROOT) -> int:
    """Return the memory of this machine, or the least limit of this process's control groups, in bytes."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _groups(root))])


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and free memory of each control group of this process that has a limit, in bytes.

    Cached pages of files that are not in use count as free: the system drops them when memory is short. Reads
    version 2 and version 1; see cgroups(7).
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in {"", "memory"}:
                yield from _limits(root / "sys/fs/cgroup" / controllers, path, *_FILES[controllers])


def _limits(mount: Path, path: str, limit: str, used: str, cached: str) -> Iterator[tuple[int, int]]:
    # A container often sees its own group as the root, whatever the path says.
    folder = mount / path.lstrip("/") if (mount / path.lstrip("/")).is_dir() else mount
    for group in (folder, *folder.parents):
        if not group.is_relative_to(mount):
            return
        # A group without the controller and the root of version 2 have no such files, and "max" is no number.
        with suppress(OSError, ValueError):
            most = int((group / limit).read_text())
            yield most, most - int((group / used).read_text()) + _cached(group, cached)


def _cached(group: Path, key: str) -> int:
    """Return the bytes of cached pages of a group; 0 where it has no statistics."""
    with suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def _own_rooms() -> Iterator[int]:
    """Yield what the limits of this process leave, in bytes. Only Linux holds a process to them."""
    if sys.platform != "linux":
        return
    import resource

    memory = psutil.Process().memory_info()
    for kind, used in ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, memory.data)):
        most, _ = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            yield most - int(used)
