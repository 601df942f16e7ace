"""Run calls on a few threads with deep stacks, in turns of the callers.

A thread begins with a call and ends when no call waits, because its stack takes address space. The size of a
stack can only be set for all threads of the process: one that another part starts in the same moment may get
a deep stack too, which costs it address space alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from convoy.errors import QueueFull

_Result = TypeVar("_Result")
# A caller with too many waiting calls is refused after this time. Most calls take a few milliseconds.
_PATIENCE_S = 0.25
# The size of a stack belongs to the process, so its lock does too: two pools that set and restore it across
# each other would leave all later threads with deep stacks.
_SETTING_STACK = threading.Lock()


def start_deep(work: Callable[[], None], stack_bytes: int) -> None:
    """Start a thread with a stack of ``stack_bytes``. Raises RuntimeError if the machine has none left."""
    with _SETTING_STACK:
        usual = threading.stack_size(stack_bytes)
        try:
            threading.Thread(target=work, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)


class DeepThreads:
    """Run one call of each caller at a time, and the callers in turn. Thread-safe."""

    def __init__(
        self,
        num_threads: int,
        max_waiting: int,
        stack_bytes: int,
        *,
        start: Callable[[Callable[[], None], int], None] = start_deep,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """Bound the pool. One caller may have ``max_waiting`` calls behind the one that runs.

        ``start`` starts a thread as `start_deep` does. ``wait`` waits for an event for some seconds, and
        tells whether it is set.
        """
        self._calls = _Calls(num_threads, max_waiting, lambda work: start(work, stack_bytes))
        self._wait = wait

    def run(self, caller: bytes, function: Callable[[], _Result], timeout_s: float) -> _Result:
        """Return the result of ``function``, or raise its error.

        Raises `TimeoutError` if it runs longer than ``timeout_s``. It cannot be interrupted, so its caller's
        next call waits for its end. Raises `QueueFull` if it does not begin within ``timeout_s``, if too many
        calls of the caller wait, or if no thread is left for it.
        """
        call = _Call(function)
        self._calls.add(caller, call)
        if not self._wait(call.begun, timeout_s) and self._calls.remove(caller, call):
            raise _too_many()
        if not self._wait(call.done, timeout_s):
            raise TimeoutError
        return call.result()

    def num_waiting(self, caller: bytes) -> int:
        """Return the number of calls of a caller that wait for a thread."""
        return self._calls.num_waiting(caller)


class _Call(Generic[_Result]):
    """Hold one call and its outcome."""

    def __init__(self, function: Callable[[], _Result]) -> None:
        self.begun, self.done = threading.Event(), threading.Event()
        self._function = function
        self._results: list[_Result] = []
        self._errors: list[BaseException] = []

    def run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._errors.append(error)
        self.done.set()

    def result(self) -> _Result:
        if self._errors:
            raise self._errors[0]
        return self._results[0]


class _Calls:
    """Hold the waiting calls of all callers, and the threads that run them."""

    def __init__(
        self, num_threads: int, max_waiting: int, start: Callable[[Callable[[], None]], None]
    ) -> None:
        self._max_threads = num_threads
        self._max_waiting = max_waiting
        self._start = start
        # The next caller comes first.
        self._waiting: OrderedDict[bytes, deque[_Call[Any]]] = OrderedDict()
        self._running: set[bytes] = set()
        self._num_threads = 0
        self._changed = threading.Condition()

    def add(self, caller: bytes, call: _Call[Any]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(caller), _PATIENCE_S):
                raise _too_many()
            self._waiting.setdefault(caller, deque()).append(call)
            self._start_if_needed()
            if not self._num_threads:
                self.remove(caller, call)
                raise _too_many()
            self._changed.notify_all()

    def num_waiting(self, caller: bytes) -> int:
        with self._changed:
            return len(self._waiting.get(caller, ()))

    def _has_room(self, caller: bytes) -> bool:
        return len(self._waiting.get(caller, ())) < self._max_waiting + (caller not in self._running)

    def remove(self, caller: bytes, call: _Call[Any]) -> bool:
        """Drop a call; return False if it has begun."""
        with self._changed:
            calls = self._waiting.get(caller, deque())
            if call not in calls:
                return False
            calls.remove(call)
            if not calls:
                del self._waiting[caller]
            self._changed.notify_all()
            return True

    def _start_if_needed(self) -> None:
        """Start a thread if a call can begin, and a thread is left."""
        if self._next_caller() is None or self._num_threads == self._max_threads:
            return
        try:
            self._start(self._work)
        except RuntimeError:
            # The machine has no thread left. The threads that run take the call when they are free.
            return
        self._num_threads += 1

    def _next_caller(self) -> bytes | None:
        return next((one for one in self._waiting if one not in self._running), None)

    def _work(self) -> None:
        """Run calls until none can begin."""
        while (taken := self._take()) is not None:
            caller, call = taken
            call.run()
            # The call's function holds the objects of its request.
            del call, taken
            with self._changed:
                self._running.discard(caller)
                self._changed.notify_all()

    def _take(self) -> tuple[bytes, _Call[Any]] | None:
        with self._changed:
            caller = self._next_caller()
            if caller is None:
                self._num_threads -= 1
                return None
            calls = self._waiting.pop(caller)
            call = calls.popleft()
            if calls:
                self._waiting[caller] = calls
            self._running.add(caller)
            # The end of a call may have let two begin.
            self._start_if_needed()
            self._changed.notify_all()
            call.begun.set()
            return caller, call


def _too_many() -> QueueFull:
    return QueueFull("too many grammars are being compiled", hint="try again later")
