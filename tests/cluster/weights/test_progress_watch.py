"""A member that makes progress is waited for: in each pass anew, and not by its own word without end."""

from __future__ import annotations

from convoy.cluster.weights.progress_watch import ProgressWatch
from convoy.wire.messages.control import Progress


def fetched(done: int, total: int) -> Progress:
    return Progress(1, done, total, "fetch")


def test_only_more_than_ever_is_further() -> None:
    watch = ProgressWatch()
    steps = [(0, 9), (4, 9), (4, 9), (3, 9), (9, 9)]
    assert [watch.is_further("beta", fetched(*step)) for step in steps] == [True, True, False, False, True]


def test_another_pass_begins_anew() -> None:
    watch = ProgressWatch()
    assert watch.is_further("beta", fetched(900, 900))
    assert watch.is_further("beta", fetched(1, 5000))
    assert watch.is_further("beta", Progress(1, 1, 900, "check"))


def test_one_member_says_nothing_of_another() -> None:
    watch = ProgressWatch()
    assert watch.is_further("beta", fetched(9, 9))
    assert watch.is_further("gamma", fetched(1, 9))


def test_passes_without_end_are_not_waited_for() -> None:
    watch = ProgressWatch()
    assert sum(watch.is_further("beta", fetched(0, total)) for total in range(1000)) == 32


def test_the_time_of_a_start_counts_for_ten_minutes() -> None:
    watch = ProgressWatch()
    steps = [watch.is_further("beta", Progress(0, seconds, 0, "examine")) for seconds in range(1, 1000)]
    assert sum(steps) == 600
