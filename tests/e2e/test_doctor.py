"""An examination beside a running cluster: it reaches the peers for real, and disturbs none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import head_options, load_head
from e2e.served import convoy
from support.driver import GREEDY


def examined(local: LocalCluster, name: str) -> tuple[int, list[dict[str, Any]]]:
    done = convoy("doctor", "--config", str(local.config_file(name)), "--json")
    return done.returncode, json.loads(done.stdout)["findings"]


def about(found: list[dict[str, Any]], check: str) -> list[str]:
    return [finding["what"] for finding in found if finding["check"] == check]


@pytest.mark.slow
@pytest.mark.long
def test_an_examination_disturbs_no_running_cluster() -> None:
    demo = ModelSource.resolve("demo-mini")
    request = GenerationRequest((1, 5, 9, 13), GREEDY, max_tokens=24)
    with LocalCluster(LocalOptions(3, num_threads=1)) as local:
        local.start_peers("demo-mini")
        config = local.config("alpha")
        cluster = RunningCluster.start(load_head(config), demo, head_options(config), watch=local.check_alive)
        try:
            before = generate(cluster.engine, request, None)
            links = dict(cluster.head.links)
            for examiner in ("alpha", "beta"):  # with the head's own identity, and with a neighbour's
                code, found = examined(local, examiner)
                assert code == 0, [finding for finding in found if finding["level"] == "fail"]
                reached = [what for what in about(found, "peers") if "proved its identity" in what]
                assert len(reached) == (2 if examiner == "alpha" else 1)
                after = generate(cluster.engine, request, None)
                assert after.token_ids == before.token_ids
            assert "beta runs and listens" in about(found, "port")[0]
            assert cluster.head.links == links
            assert cluster.health()[0]
        finally:
            cluster.close()
        for name in ("beta", "gamma"):
            log = local.log_file(name).read_text()
            assert log.count("head: alpha is here") == 1
            assert "came back" not in log


@pytest.mark.slow
@pytest.mark.long
def test_a_peer_that_is_gone_is_found_and_named() -> None:
    with LocalCluster(LocalOptions(2, num_threads=1)) as local:
        code, found = examined(local, "alpha")
    assert code == 1
    assert "could not be reached: connection refused" in about(found, "peers")[0]
