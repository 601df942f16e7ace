"""Hold tests to their process: with ``--unit``, a socket of a network or another process fails a test.

Pairs of connected sockets are allowed, because an event loop wakes itself up through one.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_PROCESSES = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system"}
)
_ADDRESSES = frozenset({"socket.bind", "socket.connect", "socket.sendto"})


class OutsideError(Exception):
    """Report that a unit test opened a socket or started a process."""


class Guard:
    """Fail a test with a set-up or body that opens a socket or starts a process. It is a plugin of pytest.

    The interpreter keeps an audit hook until it ends. So a test process installs one guard.
    """

    def __init__(self) -> None:
        self._on = False
        self._seen: list[str] = []
        sys.addaudithook(self._audit)

    def pytest_collection_finish(self) -> None:
        # A compiler is a process. It makes the kernels here, before the tests that load a stage.
        library = sys.modules.get("convoy.model.kernels.native.library")
        if library is not None:
            library.native_library()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        with self._watched():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with self._watched():
            return (yield)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False
            seen, self._seen = self._seen, []
        if seen:
            raise OutsideError(f"{', '.join(seen)}: mark the test `outside`, or let it do without")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or not _leaves(event, arguments):
            return
        # Code under test may catch the exception. The list fails the test all the same.
        self._seen.append(event)
        raise OutsideError(f"{event} in a unit test: mark it `outside`, or let it do without")


def _leaves(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "socket.__new__":
        return arguments[1] not in {socket.AF_UNIX, -1}
    return event in _PROCESSES or event in _ADDRESSES
