"""What holds for every test: the same examples in every run, and no worker that takes the machine with it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from zlib import crc32

import pytest
from hypothesis import settings

from convoy.errors import SelfCheckError
from convoy.model.kernels.native.build import INSTRUCTION_SETS, InstructionSet, built_library
from support.compile_ahead import compile_ahead
from support.examined import examine_once
from support.tls_files import trust_few
from support.unit import Guard

MAX_WORKER_BYTES = 8 << 30  # many times what any file of tests was seen to need

# Before torch is imported, here and in processes of tests: two workers with a torch thread for each core
# spin at each other's barriers, and a test takes ten times as long. Tests of threads ask for a number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where such a test has more threads than cores, a thread that waits leaves its core to the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# a third of the examples, here and in `support.examples`
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=34)
settings.register_profile("thorough", derandomize=True, deadline=None)
# to look for what those examples miss: --hypothesis-profile random --hypothesis-seed 7
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--postgres", default="", help="URL of a PostgreSQL server where databases may be made")
    parser.addoption(
        "--unit", default="", help="folders whose unit tests open no socket and start no process"
    )
    parser.addoption("--share", type=int, default=1, help="run one of this many tests, chosen by its name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    num_shares = config.getoption("--share")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if crc32(item.nodeid.encode()) % num_shares else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    if folders := config.getoption("--unit").split():
        config.pluginmanager.register(Guard([config.rootpath / folder for folder in folders]))
    bound_memory(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels and all modules before workers begin, so that no worker and no unit test does.

    A test without workers compiles at its first use, as a member does.
    """
    has_workers = session.config.getoption("numprocesses", None)
    if hasattr(session.config, "workerinput") or has_workers:
        with ThreadPoolExecutor() as pool:
            list(pool.map(_compile, INSTRUCTION_SETS))
    if has_workers:
        compile_ahead(session.config)


def _compile(of: InstructionSet) -> None:
    # The tests that need it say why it is not there.
    with suppress(SelfCheckError):
        built_library(of)


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
    """Fail a test that runs away with MemoryError and its name, where the system would kill some process.

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
