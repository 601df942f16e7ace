"""Calls run on a few threads with deep stacks: one of each caller at a time, and the callers in turn."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from convoy.errors import QueueFull
from convoy.model.constraints.deep_threads import DeepThreads, start_deep
from support.waiting import wait_until

MIB = 1024 * 1024


class Held:
    """Record the calls that run, and hold them until they may end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Semaphore(0)
        self.ended = threading.Event()
        self._changed = threading.Condition()

    def call(self, name: str) -> Callable[[], str]:
        def run() -> str:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
            assert self.go_on.acquire(timeout=30)
            self.ended.set()
            return name

        return run

    def wait_for(self, num_begun: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= num_begun, timeout=30)


@pytest.fixture
def held() -> Iterator[Held]:
    found = Held()
    yield found
    found.go_on.release(100)


def ask(threads: DeepThreads, held: Held, caller: bytes, name: str) -> threading.Thread:
    asking = threading.Thread(target=threads.run, args=(caller, held.call(name), 30.0))
    asking.start()
    return asking


def test_a_result_and_an_error_come_back() -> None:
    threads = DeepThreads(1, 1, MIB)
    assert threads.run(b"", lambda: 42, 30.0) == 42
    with pytest.raises(ZeroDivisionError):
        threads.run(b"", lambda: 1 // 0, 30.0)


def test_a_caller_holds_one_thread_and_leaves_the_others_to_others(held: Held) -> None:
    threads = DeepThreads(2, 8, MIB)
    asking = [ask(threads, held, b"greedy", f"greedy {number}") for number in range(4)]
    held.wait_for(1)
    assert threads.run(b"other", lambda: "at once", 30.0) == "at once"
    assert len(held.begun) == 1
    held.go_on.release(4)
    for one in asking:
        one.join(30)
    assert len(held.begun) == 4


def test_callers_take_turns(held: Held) -> None:
    threads = DeepThreads(1, 8, MIB)
    asking = [ask(threads, held, b"first", "a1")]
    held.wait_for(1)
    for name in ("a2", "a3"):
        asking.append(ask(threads, held, b"first", name))
        threads_wait(threads, b"first", len(asking) - 1)
    asking.append(ask(threads, held, b"second", "b1"))
    threads_wait(threads, b"second", 1)
    held.go_on.release(4)
    for one in asking:
        one.join(30)
    assert held.begun == ["a1", "a2", "b1", "a3"]


def threads_wait(threads: DeepThreads, caller: bytes, count: int) -> None:
    """Wait until ``count`` calls of a caller wait for a thread."""
    wait_until(lambda: threads.num_waiting(caller) >= count)


def test_too_many_waiting_calls_of_a_caller_are_refused(held: Held) -> None:
    threads = DeepThreads(1, 1, MIB)
    asking = [ask(threads, held, b"", "first")]
    held.wait_for(1)
    asking.append(ask(threads, held, b"", "second"))
    threads_wait(threads, b"", 1)
    with pytest.raises(QueueFull):
        threads.run(b"", lambda: None, 30.0)
    held.go_on.release(2)
    for one in asking:
        one.join(30)


def test_a_call_that_does_not_begin_in_time_never_runs(held: Held) -> None:
    threads = DeepThreads(1, 2, MIB)
    asking = ask(threads, held, b"", "first")
    held.wait_for(1)
    with pytest.raises(QueueFull):
        threads.run(b"other", held.call("late"), 0.01)
    held.go_on.release()
    asking.join(30)
    assert threads.run(b"other", lambda: 1, 30.0) == 1
    assert held.begun == ["first"]


def test_a_call_that_is_late_is_left_behind(held: Held) -> None:
    def wait_until_begun(event: threading.Event, timeout_s: float) -> bool:
        held.wait_for(1)
        return event.wait(timeout_s) if held.ended.is_set() else event.is_set()

    threads = DeepThreads(1, 2, MIB, wait=wait_until_begun)
    with pytest.raises(TimeoutError):
        threads.run(b"", held.call("late"), 30.0)
    held.go_on.release()
    assert held.ended.wait(30)
    assert threads.run(b"", lambda: 1, 30.0) == 1


def test_a_deep_recursion_fits_and_other_threads_keep_the_usual_stack() -> None:
    usual = threading.stack_size()
    threads = DeepThreads(1, 1, 256 * MIB)
    limit = sys.getrecursionlimit()

    def depth(left: int) -> int:
        # A key function makes each level a frame of C too.
        return 1 + max([left - 1], key=depth) if left else 0

    sys.setrecursionlimit(40_000)
    try:
        threads.run(b"", lambda: depth(9000), 60.0)
    finally:
        sys.setrecursionlimit(limit)
    assert threading.stack_size() == usual


def test_two_pools_at_once_leave_other_threads_the_usual_stack() -> None:
    usual, interval_s = threading.stack_size(), sys.getswitchinterval()

    def run_often(threads: DeepThreads) -> None:
        for number in range(200):
            threads.run(b"%d" % number, lambda: None, 30.0)

    asking = [threading.Thread(target=run_often, args=(DeepThreads(1, 1, MIB),)) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for one in asking:
            one.start()
        for one in asking:
            one.join(60)
    finally:
        sys.setswitchinterval(interval_s)
        found = threading.stack_size(usual)
    assert found == usual


class FewThreads:
    """Start as many threads as are left, and then fail as Python does."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def start(self, work: Callable[[], None], stack_bytes: int) -> None:
        if not self.num_left:
            raise RuntimeError("can't start new thread")
        self.num_left -= 1
        start_deep(work, stack_bytes)


def test_a_call_without_a_thread_is_refused_and_a_later_one_runs() -> None:
    few = FewThreads(0)
    threads = DeepThreads(1, 1, MIB, start=few.start)
    for _ in range(3):
        with pytest.raises(QueueFull):
            threads.run(b"", lambda: None, 30.0)
    assert threads.num_waiting(b"") == 0
    few.num_left = 1
    assert threads.run(b"", lambda: 1, 30.0) == 1


def test_calls_without_a_thread_of_their_own_wait_for_the_one_that_runs(held: Held) -> None:
    threads = DeepThreads(2, 2, MIB, start=FewThreads(1).start)
    asking = [ask(threads, held, b"first", "a")]
    held.wait_for(1)
    for caller in (b"first", b"second", b"third"):
        asking.append(ask(threads, held, caller, "later"))
        threads_wait(threads, caller, 1)
    held.go_on.release(4)
    for one in asking:
        one.join(30)
    assert len(held.begun) == 4


def test_a_thread_ends_when_no_call_waits_and_a_later_call_has_a_new_one() -> None:
    threads, seen = DeepThreads(2, 1, MIB), []
    for caller in (b"a", b"b"):
        threads.run(caller, lambda: seen.append(threading.current_thread()), 60.0)
        seen[-1].join(30)
        assert not seen[-1].is_alive()


def test_as_many_callers_run_at_once_as_there_are_threads() -> None:
    threads, both = DeepThreads(2, 1, MIB), threading.Barrier(2)
    callers = [threading.Thread(target=threads.run, args=(name, both.wait, 60.0)) for name in (b"a", b"b")]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not both.broken
    assert threads.num_waiting(b"a") == threads.num_waiting(b"b") == 0
