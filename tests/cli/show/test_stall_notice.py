"""An answer that pauses: the cluster is asked why, and a recovery is told once."""

from __future__ import annotations

import queue
import threading

from convoy.cli.show.stall_notice import StallNotice

SOON_S = 0.01


class Cluster:
    """Answer each question with the next of its reasons, and let the test see that it was asked."""

    def __init__(self, *reasons: str | None) -> None:
        self._reasons = list(reasons)
        self.asked = threading.Semaphore(0)
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def reason(self) -> str | None:
        self.asked.release()
        return self._reasons.pop(0) if len(self._reasons) > 1 else self._reasons[0]

    def wait(self, times: int) -> None:
        for _ in range(times):
            assert self.asked.acquire(timeout=30)


def test_each_recovery_is_told_once_and_health_not_at_all() -> None:
    cluster = Cluster("beta is gone", "beta is gone", None, "gamma is gone", "it loads", None)
    with StallNotice(cluster.reason, cluster.told.put, SOON_S):
        cluster.wait(8)
    told = [cluster.told.get_nowait() for _ in range(cluster.told.qsize())]
    assert told == ["beta is gone", "gamma is gone"]


def test_a_recovery_after_a_piece_of_the_answer_is_another_one() -> None:
    cluster = Cluster("beta is gone")
    with StallNotice(cluster.reason, cluster.told.put, SOON_S) as notice:
        assert cluster.told.get(timeout=30) == "beta is gone"
        notice.came()
        assert cluster.told.get(timeout=30) == "beta is gone"


def test_nothing_is_asked_where_the_answer_comes_in_time() -> None:
    cluster = Cluster("never asked")
    with StallNotice(cluster.reason, cluster.told.put, quiet_s=3600.0) as notice:
        notice.came()
    assert not cluster.asked.acquire(blocking=False)
