"""What a process may still take, from files as Linux writes them and from the limits of a real process."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from convoy.plan.memory.free import free_bytes, total_bytes

GB = 10**9
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a file of the system, on a machine that has 100 GB free."""
    memory = psutil.virtual_memory()._replace(available=100 * GB, total=120 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    # This process may have a limit of its own.
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


def test_without_control_groups_the_machine_alone_counts(write: Write, tmp_path: Path) -> None:
    assert (free_bytes(1, tmp_path), free_bytes(4, tmp_path), total_bytes(tmp_path)) == (
        100 * GB,
        25 * GB,
        120 * GB,
    )


def test_the_least_limit_of_all_groups_above_a_process_holds(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/pod/container\n")
    write("sys/fs/cgroup/pod/memory.max", f"{8 * GB}\n")
    write("sys/fs/cgroup/pod/memory.current", f"{5 * GB}\n")
    write("sys/fs/cgroup/pod/memory.stat", f"anon {4 * GB}\ninactive_file {GB}\n")
    write("sys/fs/cgroup/pod/container/memory.max", "max\n")
    write("sys/fs/cgroup/pod/container/memory.current", f"{2 * GB}\n")
    write("sys/fs/cgroup/pod/container/memory.stat", "inactive_file 0\n")
    assert (free_bytes(1, tmp_path), free_bytes(2, tmp_path), total_bytes(tmp_path)) == (
        4 * GB,
        2 * GB,
        8 * GB,
    )


def test_a_group_without_the_controller_has_the_limits_above_it(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/user/service\n")
    write("sys/fs/cgroup/user/memory.max", f"{8 * GB}\n")
    write("sys/fs/cgroup/user/memory.current", f"{5 * GB}\n")
    write("sys/fs/cgroup/user/service/cgroup.procs", "1\n")
    assert (free_bytes(1, tmp_path), total_bytes(tmp_path)) == (3 * GB, 8 * GB)


def test_a_container_that_sees_its_group_as_the_root_has_that_limit(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/somewhere/outside\n")
    write("sys/fs/cgroup/memory.max", f"{6 * GB}\n")
    write("sys/fs/cgroup/memory.current", f"{2 * GB}\n")
    write("sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    assert (free_bytes(1, tmp_path), total_bytes(tmp_path)) == (4 * GB, 6 * GB)


def test_version_1_counts_the_caches_of_the_groups_below_too(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "9:cpu:/one\n4:memory:/one\n0::/\n")
    write("sys/fs/cgroup/memory/one/memory.limit_in_bytes", f"{16 * GB}\n")
    write("sys/fs/cgroup/memory/one/memory.usage_in_bytes", f"{10 * GB}\n")
    write("sys/fs/cgroup/memory/one/memory.stat", f"inactive_file 0\ntotal_inactive_file {3 * GB}\n")
    assert (free_bytes(1, tmp_path), total_bytes(tmp_path)) == (9 * GB, 16 * GB)


def test_a_group_over_its_limit_leaves_nothing(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/one\n")
    write("sys/fs/cgroup/one/memory.max", f"{GB}\n")
    write("sys/fs/cgroup/one/memory.current", f"{2 * GB}\n")
    write("sys/fs/cgroup/one/memory.stat", "")
    assert free_bytes(1, tmp_path) == 0


@pytest.mark.outside
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to these limits")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_counts(kind: str) -> None:
    program = (
        f"import resource; resource.setrlimit(resource.{kind}, (1 << 30, 1 << 30))\n"
        "from convoy.plan.memory.free import free_bytes; print(free_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # Python itself takes a part of it.
    assert 1 << 29 < int(done.stdout) < 1 << 30
