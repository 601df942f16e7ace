"""The configuration files of a cluster on this machine."""

from __future__ import annotations

import errno
import queue

import pytest

from convoy.cli.show.exit_codes import EXIT_RETRY, exit_code
from convoy.errors import ConfigError
from convoy.sdk.local_cluster import LocalCluster, LocalOptions


@pytest.mark.parametrize(
    ("device", "kernel", "members", "written"),
    [
        ("cuda:0", "exact-q8", ["cuda:0"], ["exact-q8"]),
        ("cuda:0,cuda:1", "exact-q4", ["cuda:0", "cuda:1"], ["exact-q4", "exact-q4"]),
        ("cpu,cuda:0", "exact-q8", ["cpu", "cuda:0"], ["exact-q8", "exact-q8"]),
        ("cpu,cuda:0", "exact-f32", ["cpu", "cuda:0"], ["exact-f32", "auto"]),
        ("cpu+cpu", "exact-q8", ["cpu+cpu"], ["exact-q8"]),
        ("auto", "exact-q8", ["auto"], ["exact-q8"]),
    ],
)
def test_the_kernel_that_is_asked_for_reaches_every_member_that_can_run_it(
    monkeypatch: pytest.MonkeyPatch, device: str, kernel: str, members: list[str], written: list[str]
) -> None:
    monkeypatch.setattr(LocalOptions, "devices", members)
    options = LocalOptions(len(members), kernel=kernel, num_threads=1, device=device, memory_gb=1.0)
    with LocalCluster(options) as local:
        assert [local.config(name).model.kernel for name in local.names] == written


def test_an_error_keeps_its_cause_while_every_member_lives() -> None:
    error = ConfigError("port 7777 is taken")
    error.__cause__ = OSError(errno.EADDRINUSE, "address already in use")
    with LocalCluster(LocalOptions(1, num_threads=1, memory_gb=1.0)) as local:
        with pytest.raises(ConfigError) as raised:
            local.reraise(error)
        assert exit_code(raised.value) == EXIT_RETRY


def test_a_member_that_is_killed_is_told_of_and_those_that_the_cluster_ends_are_not() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with LocalCluster(LocalOptions(3, num_threads=1, memory_gb=1.0)) as local:
        local.start_peers("demo-mini")
        local.tell_ends(told.put)
        local.processes["beta"].kill()
        said = "beta was killed by signal 9; it does not come back before this command is started again"
        assert told.get(timeout=60) == said
    assert told.empty()
