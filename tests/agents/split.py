"""A model over two members: the head with its HTTP server in this process, and a peer in its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from convoy.api.listen.options import ServeOptions
from convoy.cluster.running import RunningCluster
from convoy.model.checkpoints.source import ModelSource
from convoy.sdk.head import service_of
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import head_options, load_head
from convoy.sdk.server import http_server
from convoy.testing import Script

MODEL = "synthetic:agent"
HEAD, PEER = "alpha", "beta"
# A plan without the peer, if its start took longer, would be another one.
START_WAIT_S = 240.0


@dataclass
class Split:
    """Run a cluster of two members."""

    local: LocalCluster
    cluster: RunningCluster

    @contextmanager
    def serve(self, script: Script) -> Iterator[str]:
        """Serve HTTP with the answers of ``script`` until the block ends, and yield the URL."""
        with http_server(script.serve(service_of(self.cluster)), ServeOptions(port=0)) as url:
            yield url

    def members(self) -> list[str]:
        """Return the members that hold stages."""
        return [stage.member for stage in self.cluster.status().stages]

    def recoveries(self) -> int:
        return self.cluster.engine.stats().recoveries

    def kill_peer(self) -> None:
        """Kill the peer as `kill -9` does, and return once its process has ended."""
        process = self.local.processes[PEER]
        process.kill()
        process.wait()


@contextmanager
def split() -> Iterator[Split]:
    """Bring the cluster up, and take it down."""
    with LocalCluster(LocalOptions(2, num_threads=1)) as local:
        local.start_peers(MODEL)
        config = local.config(local.head)
        source = ModelSource.resolve(MODEL)
        cluster = RunningCluster.start(
            load_head(config),
            source,
            replace(head_options(config), wait_s=START_WAIT_S),
            watch=local.check_alive,
        )
        try:
            yield Split(local, cluster)
        finally:
            cluster.close()
