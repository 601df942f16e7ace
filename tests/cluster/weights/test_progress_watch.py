"""A member that makes progress is waited for: in each pass anew, and not by its own word without end."""

from __future__ import annotations

from convoy.cluster.weights.progress_watch import ProgressWatch
from convoy.wire.messages.control import Progress, StartPhase


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


def test_the_reports_of_a_phase_of_a_start_count_for_ten_minutes_of_the_heads_clock() -> None:
    clock = [0.0]
    watch = ProgressWatch(lambda: clock[0])

    def counts(now_s: float, seconds: int, phase: StartPhase) -> bool:
        clock[0] = now_s
        return watch.is_further("beta", Progress(0, seconds, 0, phase))

    assert [counts(now_s, 1 + now_s, "import") for now_s in (0, 1, 599, 600, 700)] == [True] * 3 + [False] * 2
    assert counts(700, 10**9, "examine"), "the next phase begins, however long the peer says that it lasted"
    assert not counts(1299, 5, "examine"), "its seconds went back"
    assert counts(1299, 10**9 + 1, "examine")
    assert not counts(1300, 10**9 + 2, "examine")


def test_a_start_with_many_totals_or_a_plan_is_not_waited_for() -> None:
    watch = ProgressWatch(lambda: 0.0)
    reports = [Progress(0, seconds, total, "examine") for total in range(1, 33) for seconds in range(1, 600)]
    assert not any(watch.is_further("beta", report) for report in reports)
    assert not watch.is_further("beta", Progress(1, 1, 0, "examine"))
