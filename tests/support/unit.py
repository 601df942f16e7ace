"""Hold unit tests to their process: a socket of a network or another process fails one.

Pairs of connected sockets are allowed, because an event loop wakes itself up through one.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_PROCESSES = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system"}
)
_ADDRESSES = frozenset({"socket.bind", "socket.connect", "socket.sendto"})


class OutsideError(Exception):
    """Report that a unit test opened a socket or started a process."""


class Guard:
    """Fail a unit test that opens a socket or starts a process in its set-up or body: a plugin of pytest.

    A unit test lies in one of ``folders`` and is not marked long, slow or outside. Other tests run as ever.
    Where they left threads, such as a server's that several tests share, the main thread alone is watched.

    The interpreter keeps an audit hook until it ends. So a test process installs one guard.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._on = False
        self._seen: list[str] = []
        # The threads of an empty process, and whether the process had others before the test.
        self._own: frozenset[threading.Thread] = frozenset()
        self._is_shared = False
        sys.addaudithook(self._audit)

    def pytest_collection_finish(self) -> None:
        self._own = frozenset(threading.enumerate())
        # A compiler is a process. It makes the kernels here, before the tests that load a stage.
        library = sys.modules.get("convoy.model.kernels.native.library")
        if library is not None:
            library.native_library()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._watched(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._watched(item):
            return (yield)

    @contextmanager
    def _watched(self, item: pytest.Item) -> Iterator[None]:
        self._is_shared = not self._own.issuperset(threading.enumerate())
        self._on = self._is_unit_test(item)
        try:
            yield
        finally:
            self._on = False
            seen, self._seen = self._seen, []
        if seen:
            raise OutsideError(f"{', '.join(seen)}: mark the test `outside`, or let it do without")

    def _is_unit_test(self, item: pytest.Item) -> bool:
        is_inside = any(item.path.is_relative_to(folder) for folder in self._folders)
        return is_inside and not any(item.get_closest_marker(name) for name in ("long", "slow", "outside"))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or not _leaves(event, arguments):
            return
        # A thread that an earlier test left may start others at any time.
        if self._is_shared and threading.current_thread() is not threading.main_thread():
            return
        # Code under test may catch the exception. The list fails the test all the same.
        self._seen.append(event)
        raise OutsideError(f"{event} in a unit test: mark it `outside`, or let it do without")


def _leaves(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "socket.__new__":
        return arguments[1] not in {socket.AF_UNIX, -1}
    return event in _PROCESSES or event in _ADDRESSES
