"""A send that hangs is ended from another thread; one that does not is left alone."""

from __future__ import annotations

import threading
from typing import cast

from convoy.engine.run.liveness import LivenessProbe
from convoy.engine.run.send_guard import SendGuard
from convoy.transport.link.link import Link

WAIT_S = 20.0


class FakeLink:
    """Note that it was dismissed."""

    peer = "beta"

    def __init__(self) -> None:
        self.dismissed = threading.Event()

    def dismiss(self, _reason: str, *, revoke: bool) -> None:
        assert revoke
        self.dismissed.set()


def test_a_link_that_takes_nothing_for_longer_than_a_step_may_take_is_ended() -> None:
    guard, link = SendGuard(lambda: 0.6), FakeLink()
    guard.begin(cast(Link, link))
    assert link.dismissed.wait(WAIT_S)
    guard.close()


def test_a_send_that_ended_in_time_costs_no_link() -> None:
    looked = threading.Event()

    def allowed_s() -> float:
        looked.set()
        return 0.0

    guard, quick, hung = SendGuard(allowed_s), FakeLink(), FakeLink()
    guard.begin(cast(Link, quick))
    guard.end()
    guard.begin(cast(Link, hung))
    assert hung.dismissed.wait(WAIT_S)
    assert looked.is_set()
    assert not quick.dismissed.is_set()
    guard.close()


def test_a_send_that_is_long_takes_its_time_while_the_peer_is_there() -> None:
    looked = threading.Semaphore(0)

    class Beats:
        gone = False

        def is_gone(self) -> bool:
            looked.release()
            return self.gone

    guard, link, probe = SendGuard(lambda: 0.0), FakeLink(), Beats()
    guard.begin(cast(Link, link), cast(LivenessProbe, probe))
    for _ in range(2):
        assert looked.acquire(timeout=WAIT_S)
    assert not link.dismissed.is_set()
    probe.gone = True
    assert link.dismissed.wait(WAIT_S)
    guard.close()
