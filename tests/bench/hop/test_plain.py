"""The only stream without sealing: the modules that may import it, and the addresses that it may use."""

from __future__ import annotations

import functools
from pathlib import Path

from architecture.source import import_graph, load_modules
from convoy.bench.hop.names import HOST

SRC = Path(__file__).resolve().parents[3] / "src"
PLAIN = "convoy.bench.hop.plain"


@functools.cache
def graph() -> dict[str, dict[str, int]]:
    """What each module imports."""
    return import_graph(load_modules(SRC))


def test_nothing_outside_the_bench_imports_the_plain_stream() -> None:
    importers = {name for name, edges in graph().items() if PLAIN in edges}
    assert importers == {"convoy.bench.hop.connection"}


def test_only_its_own_verbs_import_the_bench() -> None:
    importers = {
        name
        for name, edges in graph().items()
        if not name.startswith("convoy.bench") and any(target.startswith("convoy.bench") for target in edges)
    }
    # This scene is started by bench verbs alone, and its links go through a relay of the bench.
    scenes = {"convoy.cli.local.served_cluster"}
    assert importers > scenes
    assert all(name.startswith("convoy.cli.bench") for name in importers - scenes)


def test_the_plain_stream_stays_on_loopback() -> None:
    assert HOST == "127.0.0.1"
