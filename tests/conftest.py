"""What holds for every test: the same examples in every run, and no worker that takes the machine with it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from support.examined import examine_once
from support.tls_files import trust_few
from support.unit import Guard

MAX_WORKER_BYTES = 8 << 30  # many times what any file of tests was seen to need

# Before torch is imported, here and in what tests start: two workers whose torch has a thread for each core
# spin at each other's barriers, and a test takes ten times as long. Tests of threads ask for a number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where such a test has more threads than cores, a thread that waits leaves its core to the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile("repeatable", derandomize=True, deadline=None)
# all examples, where `support.examples` takes a third of them
settings.register_profile("thorough", derandomize=True, deadline=None)
# to look for what those examples miss: --hypothesis-profile random --hypothesis-seed 7
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--postgres", default="", help="URL of a PostgreSQL server where databases may be made")
    parser.addoption(
        "--unit", default="", help="folders whose unit tests open no socket and start no process"
    )


def pytest_configure(config: pytest.Config) -> None:
    if folders := config.getoption("--unit").split():
        config.pluginmanager.register(Guard([config.rootpath / folder for folder in folders]))
    bound_memory(config)


def pytest_collectstart() -> None:
    # Not in a process that only shares tests out, which would stay without a collector.
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish() -> None:
    """Keep the modules and tests, which stay until the end, out of every later search for garbage.

    They are millions of objects, and each search of all of them takes a second.
    """
    gc.freeze()
    gc.enable()


def bound_memory(config: pytest.Config) -> None:
    """A test that runs away fails with MemoryError and its name, where the system would kill some process.

    Data, not address space: torch and the threads reserve far more than they use. Elsewhere than on Linux
    such a limit bounds nothing.
    """
    if hasattr(config, "workerinput") and sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = MAX_WORKER_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_WORKER_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


@pytest.fixture(scope="session", autouse=True)
def examined_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        examine_once(patch)
        trust_few(patch, tmp_path_factory.mktemp("trusted"))
        yield
