"""Pinned members have cores of their own, and what cannot be pinned is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from convoy.cli.local.pin import pinned, share_cores
from convoy.errors import UsageError
from convoy.sdk.local_cluster import LocalCluster, LocalOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins here")


def test_cores_are_dealt_out_evenly_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 0, 5, 1, 7})
    assert share_cores(2) == ((0, 1), (3, 5))
    assert share_cores(1) == ((0, 1, 3, 5, 7),)


def test_more_members_than_cores_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    with pytest.raises(UsageError, match="3 members need a core each, and this process may use 2"):
        share_cores(3)


def test_a_system_without_pinning_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(UsageError, match="does not let a process choose its cores") as caught:
        share_cores(1)
    assert "leave --pin out" in str(caught.value.hint)


def test_a_thread_is_pinned_for_as_long_as_it_was_asked() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with pinned((core,)):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before
    with pinned(None):
        assert os.sched_getaffinity(0) == before


def test_a_member_of_a_pinned_cluster_runs_on_its_own_cores() -> None:
    core = max(os.sched_getaffinity(0))
    options = LocalOptions(2, cores=((min(os.sched_getaffinity(0)),), (core,)))
    assert options.threads == 1
    with LocalCluster(options) as local:
        process = local.start(
            "beta", "join", "--config", str(local.config_file("beta")), "--until-stdin-closes"
        )
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        assert all(os.sched_getaffinity(int(thread.name)) == {core} for thread in threads)
