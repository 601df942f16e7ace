"""Run the tests in forks of the process that collected them, file by file: a plugin of pytest.

Every worker of pytest-xdist imports PyTorch, transformers and all test files for itself, and collects. That
takes the CPU time of several hundred tests. A fork has all of it already, and shares the memory.

Files are handed out one at a time, in the order of their names. A file stays with one worker, so its fixtures
are made once, and a worker keeps the fixtures of a session from file to file. This needs a system where a
process without other threads may fork and go on, such as Linux.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

# Many times what any file of tests was seen to need.
MAX_WORKER_BYTES = 8 << 30
_REPORTER = "terminalreporter"
_TASKS = Path("/proc/self/task")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="forks that share the tests; 0: no fork")


def pytest_configure(config: pytest.Config) -> None:
    if count := config.getoption("--workers"):
        config.pluginmanager.register(Workers(count))


def bound_memory() -> None:
    """Let a test that runs away fail with MemoryError and its name, where the system would kill some process.

    Data, not address space: torch and the threads reserve far more than they use. Elsewhere than on Linux
    such a limit bounds nothing.
    """
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = MAX_WORKER_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_WORKER_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


@dataclass
class _Worker:
    """Hold a fork and the names of the tests that it has and has not finished, in their order."""

    process_id: int
    connection: Connection[Any, Any]
    unfinished: dict[str, pytest.Item] = field(default_factory=dict)


class Workers:
    """Share the tests out among ``count`` forks, and pass on what they report."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[_Worker] = []
        # Of each file, the places of its tests in the session's list.
        self._files: deque[list[int]] = deque()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests; leave errors of the collection, and runs without a test, to pytest itself."""
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None
        _require_one_thread()
        self._files = deque(_by_file(session.items))
        try:
            self._share_out(session)
        except KeyboardInterrupt:
            # The terminal interrupts the workers too.
            raise
        except BaseException:
            for worker in self._workers:
                os.kill(worker.process_id, signal.SIGINT)
            raise
        finally:
            for worker in self._workers:
                # A worker that still reports ends at its next report.
                worker.connection.close()
                os.waitpid(worker.process_id, 0)
        return True

    def _share_out(self, session: pytest.Session) -> None:
        # Folders of tests are inside one, which pytest removes some runs later.
        folder: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        session.config.get_terminal_writer().flush()
        for number in range(min(self._count, len(self._files))):
            worker = self._fork(session, folder / f"worker-{number}")
            self._workers.append(worker)
            self._give(session, worker)
        while self._workers:
            ready = wait([worker.connection for worker in self._workers])
            for worker in [worker for worker in self._workers if worker.connection in ready]:
                self._hear(session, worker)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        if self._files:
            raise session.Failed("every worker has ended before all tests were run")

    def _fork(self, session: pytest.Session, folder: Path) -> _Worker:
        ours, theirs = Pipe()
        process_id = os.fork()
        if process_id == 0:
            # Otherwise a worker's connection would stay open as long as the later ones live.
            for connection in (ours, *(worker.connection for worker in self._workers)):
                connection.close()
            _serve(session, theirs, folder)
        theirs.close()
        return _Worker(process_id, ours)

    def _give(self, session: pytest.Session, worker: _Worker) -> None:
        """Send the places of a file's tests to a worker, or none if no file is left."""
        places = self._files.popleft() if self._files else []
        worker.unfinished |= {session.items[place].nodeid: session.items[place] for place in places}
        worker.connection.send(places)

    def _hear(self, session: pytest.Session, worker: _Worker) -> None:
        hook = session.config.hook
        try:
            kind, told = worker.connection.recv()
            if kind == "next":
                self._give(session, worker)
                return
        # It has ended, or was killed between its question and the answer.
        except (EOFError, OSError):
            self._bury(session, worker)
            return
        if kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=_as_warning(*told))
            return
        report = hook.pytest_report_from_serializable(config=session.config, data=told)
        if report.when == "teardown":
            worker.unfinished.pop(report.nodeid, None)
        hook.pytest_runtest_logreport(report=report)

    def _bury(self, session: pytest.Session, worker: _Worker) -> None:
        """Fail the tests of a worker that has ended before their time. No worker takes its place."""
        self._workers.remove(worker)
        worker.connection.close()
        _, status = os.waitpid(worker.process_id, 0)
        why = f"the worker that ran it ended with status {os.waitstatus_to_exitcode(status)}"
        for name, item in worker.unfinished.items():
            report = pytest.TestReport(name, item.location, {}, "failed", why, "call")
            session.config.hook.pytest_runtest_logreport(report=report)
            why = "the worker that had it ended before it"


def _require_one_thread() -> None:
    """Raise UsageError if an imported module started threads: a fork would lack them and keep their locks."""
    threads = {thread.name for thread in threading.enumerate()}
    count = len(list(_TASKS.iterdir())) if _TASKS.exists() else len(threads)
    if count > 1:
        raise pytest.UsageError(f"--workers: a test file started threads: {count}, of which {threads}")


def _by_file(items: Sequence[pytest.Item]) -> Iterable[list[int]]:
    """Return the places of each file's tests in ``items``; a file comes where its first test is."""
    files: dict[Path, list[int]] = {}
    for place, item in enumerate(items):
        files.setdefault(item.path, []).append(place)
    return files.values()


def _as_warning(text: str, file: str, line: int, when: str, name: str) -> dict[str, Any]:
    """Return the arguments of pytest's hook for a warning that a worker recorded."""
    warning = warnings.WarningMessage(pytest.PytestWarning(text), pytest.PytestWarning, file, line)
    return {"warning_message": warning, "when": when, "nodeid": name, "location": None}


class _Relay:
    """Send reports and warnings to the first process, in place of writing them to the terminal."""

    def __init__(self, config: pytest.Config, connection: Connection[Any, Any]) -> None:
        # The stacks of a test that takes too long are written there.
        self._tw = config.get_terminal_writer()
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._connection.send(
            ("report", hook.pytest_report_to_serializable(config=self._config, report=report))
        )

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str
    ) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self._connection.send(
            ("warning", (text, warning_message.filename, warning_message.lineno, when, nodeid))
        )


def _serve(session: pytest.Session, connection: Connection[Any, Any], folder: Path) -> NoReturn:
    """Run the tests that the first process names, in a fork of it, and end the fork."""
    status = 1
    try:
        _settle(session.config, connection, folder)
        try:
            _run(session, connection)
            status = 0
        except KeyboardInterrupt:
            # Otherwise what the fixtures started would go on.
            session._setupstate.teardown_exact(None)
    # The first process has ended the run.
    except (BrokenPipeError, EOFError):
        pass
    except BaseException:  # noqa: BLE001 - nothing may go on with the first process's work
        traceback.print_exc()
    finally:
        os._exit(status)


def _settle(config: pytest.Config, connection: Connection[Any, Any], folder: Path) -> None:
    """Take leave of everything that a fork shares with the first process and may not use."""
    bound_memory()
    # Otherwise all workers would draw the same names and ports.
    random.seed()
    folder.mkdir(mode=0o700)
    # As pytest-xdist gives it with an option, which is read before the collection.
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    # The files of captured output have one position for all processes.
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    relay = _Relay(config, connection)
    config.pluginmanager.unregister(name=_REPORTER)
    config.pluginmanager.register(relay, _REPORTER)


def _run(session: pytest.Session, connection: Connection[Any, Any]) -> None:
    run, items = session.config.hook.pytest_runtest_protocol, session.items
    places: list[int] = connection.recv()
    while places:
        for place, following in pairwise(places):
            run(item=items[place], nextitem=items[following])
        # A fixture lives on if the next test uses it. So the next file is known before the last test ends.
        connection.send(("next", None))
        later: list[int] = connection.recv()
        run(item=items[places[-1]], nextitem=items[later[0]] if later else None)
        places = later
