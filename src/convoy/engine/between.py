"""What has to be done on the engine's thread while no step is in flight, such as carrying K/V off."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from convoy.engine.executor import Executor
from convoy.engine.scheduler import Scheduler
from convoy.errors import ConvoyError, StageLost

# The executor, the scheduler, and the lock to hold while the scheduler is looked at or changed.
Between = Callable[[Executor, Scheduler, threading.Condition], Any]


class BetweenSteps:
    """Waiting pieces of work, first come, first served. The engine's lock guards all but `do_one`."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Between, Future[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Between) -> Future[Any]:
        """``work`` will be done, or refused."""
        future: Future[Any] = Future()
        self._waiting.append((work, future))
        return future

    def drop(self, future: Future[Any]) -> bool:
        """Take back what ``future`` stands for; False if it was begun already."""
        before = len(self._waiting)
        self._waiting = deque(one for one in self._waiting if one[1] is not future)
        return len(self._waiting) < before

    def do_one(self, executor: Executor, scheduler: Scheduler, lock: threading.Condition) -> None:
        """Do the first. What it raises goes to who waits; a lost stage, or a bug, to the caller too."""
        with lock:
            if not self._waiting:
                return
            work, future = self._waiting.popleft()
        try:
            future.set_result(work(executor, scheduler, lock))
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, StageLost) or not isinstance(error, ConvoyError):
                raise

    def refuse(self, error: ConvoyError) -> None:
        """None of what waits will be done."""
        while self._waiting:
            self._waiting.popleft()[1].set_exception(error)
