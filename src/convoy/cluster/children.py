"""Members as child processes of this one: started together, and ended together, for whatever reason."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from contextlib import ExitStack
from types import TracebackType
from typing import Self


class Started(ABC):
    """Start something on entering a `with` and end it on leaving it, also if its start fails halfway.

    A subclass has `_start`, which puts the parts to end on ``_stack``, in reverse order.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @abstractmethod
    def _start(self) -> None: ...


def wait_or_kill(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """Wait until a process has ended as it was asked to. Kill it after ``wait_s`` seconds."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """Send SIGTERM if the process still runs, and `wait_or_kill`."""
    if process.poll() is None:
        process.terminate()
    wait_or_kill(process, wait_s)
